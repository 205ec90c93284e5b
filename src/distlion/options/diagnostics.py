"""Measurements of the workers' agreement on each parameter, on a sample, at intervals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.exchange import plan_sample
from distlion.kernels import Segment
from distlion.options.sample import draw_sample, measure_dispersion, place_sample
from distlion.step import VotingParam, count_turns, read_together
from distlion.transport import ByteCount
from distlion.vote import ParameterReply

# Number of measurements kept for each parameter.
_KEPT_MEASURES = 1000
ABSENT = math.nan
"""Placeholder for the numbers of a worker without a gradient."""


@dataclass(frozen=True)
class Diagnosis:
    """The workers' agreement on one parameter in one step.

    Equation, for each element, over the n workers present:
        margin = |sum_i sign(c_i)| / n    tie: sum_i sign(c_i) = 0
        agreement: sign(S) = sign(sum_i c_i), where the latter is not 0: what global Lion would do
        dispersion = ||mean_i m_i||^2 / mean_i ||m_i||^2, before the step

    Attributes:
        step: Number of the step, counted from 0.
        parameter: Name of the parameter.
        margin: Mean margin over the sample; 1 where all vote alike.
        ties: Share of ties in the sample.
        agreement: Share of agreement among elements with a direction; 1 where none has one.
        dispersion: 1 where momenta are equal, about 1 / N where they have nothing in common.
    """

    step: int
    parameter: str
    margin: float
    ties: float
    agreement: float
    dispersion: float


class Examiner:
    """The diagnosis of an optimizer's votes every few steps.

    Args:
        every: Steps from one diagnosis to the next, the first step included.
        params: The trainable parameters.
        n_workers: Workers that vote.
        seed: Seed of the sample, equal on all workers.
        earlier: An examiner of fewer parameters, whose findings are kept.
    """

    def __init__(
        self,
        every: int,
        params: Sequence[VotingParam],
        *,
        n_workers: int,
        seed: int,
        earlier: Examiner | None,
    ) -> None:
        self._every = every
        self._params, self._n_turns = params, count_turns(params)
        self._n_workers = n_workers
        self._sample = draw_sample(params, seed)
        self._places = place_sample(self._sample, params)
        found = [] if earlier is None else earlier.found
        self._found: deque[Diagnosis] = deque(found, maxlen=_KEPT_MEASURES * len(params))

    @property
    def found(self) -> list[Diagnosis]:
        """The latest findings, the oldest first."""
        return list(self._found)

    def is_due(self, step: int) -> bool:
        """Return whether a step is due for a diagnosis."""
        return step // self._n_turns % self._every == 0

    def plan(self, step: int) -> ByteCount:
        """Declare the bytes that each worker sends for it in a step."""
        if not self.is_due(step):
            return ByteCount()
        turn = step % self._n_turns
        voting = [param.position for param in self._params if param.turn == turn]
        return plan_sample(2 * sum(len(self._sample[at]) for at in voting), self._n_workers)

    def list_numbers(self, segments: Mapping[int, Segment]) -> list[float]:
        """List a worker's directions and momenta at the sample, before the commit.

        Args:
            segments: Segments by position. Without a gradient, directions are ``ABSENT``.
        """
        numbers: list[Tensor] = []
        for position, segment in sorted(segments.items()):
            index = self._places[position]
            m = segment.exp_avg.view(-1)[index].double()
            if segment.grad is None:
                directions = torch.full_like(m, ABSENT)
            else:
                hyper = segment.coefficients
                g = segment.grad.view(-1)[index].double() * hyper.grad_scale
                directions = hyper.beta1 * m + (1 - hyper.beta1) * g
                if hyper.cautious:
                    directions = directions.where(directions.sign() == g.sign(), 0.0)
            numbers += [directions, m]
        return read_together(numbers)

    def conclude(
        self, step: int, rows: Sequence[Sequence[float]], replies: Iterable[ParameterReply]
    ) -> None:
        """Compare all workers' numbers with the replies.

        Args:
            step: Number of the step, counted from 0.
            rows: ``list_numbers`` of every worker, in rank order.
            replies: Replies for all listed parameters.
        """
        at = 0
        for reply in sorted(replies, key=lambda each: each.position):
            index = self._sample[reply.position]
            n = len(index)
            mine = [row[at : at + 2 * n] for row in rows]
            at += 2 * n
            updates = reply.read(index.to(reply.packed.device))
            found = diagnose(step, self._params[reply.position].name, mine, updates)
            if found is not None:
                self._found.append(found)


def diagnose(
    step: int, name: str, rows: Sequence[Sequence[float]], updates: Sequence[int]
) -> Diagnosis | None:
    """Compare the workers on one parameter.

    Args:
        step: Number of the step, counted from 0.
        name: Name of the parameter.
        rows: For each worker, its directions and then its momenta.
        updates: S of each element of the sample.

    Returns:
        The diagnosis; None where nobody voted, or there is nothing to sample.
    """
    n = len(updates)
    directions = [row[:n] for row in rows if n and not math.isnan(row[0])]
    if not directions:
        return None
    margins, ties, agreed, led = [], 0, 0, 0
    for column, update in zip(zip(*directions, strict=True), updates, strict=True):
        votes = sum(map(_sign, column))
        margins.append(abs(votes) / len(column))
        ties += votes == 0
        lead = _sign(math.fsum(column))
        led += lead != 0
        agreed += lead != 0 and lead == _sign(update)
    return Diagnosis(
        step=step,
        parameter=name,
        margin=math.fsum(margins) / n,
        ties=ties / n,
        agreement=agreed / led if led else 1.0,
        dispersion=measure_dispersion([row[n:] for row in rows]),
    )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

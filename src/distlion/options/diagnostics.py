"""How far workers agree, parameter by parameter: measured on a sample, now and then."""

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

# So many measures are kept for each parameter.
_KEPT_MEASURES = 1000
ABSENT = math.nan
"""Stands for the numbers of a worker that has no gradient."""


@dataclass(frozen=True)
class Diagnosis:
    """How the workers stood to each other on one parameter in one step.

    Equation, for each element, over the n votes of workers present, each as often as it counts:
        margin = |sum_i sign(c_i)| / n    tie: sum_i sign(c_i) = 0
        agreement: sign(S) = sign(sum_i c_i), where the latter is not 0: what global Lion would do
        dispersion = ||mean_i m_i||^2 / mean_i ||m_i||^2, before the step

    Attributes:
        step: Counted from 0.
        parameter: Its name.
        margin: Mean over the sample; 1 where all vote alike.
        ties: Share of the sample.
        agreement: Share of those with a direction; 1 where none has one.
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
        seed: Of the sample, equal on all workers.
        earlier: One whose parameters were fewer; what it found is kept.
        counted_rows: Rows of workers, each as often as its vote counts; None where it is once.
    """

    def __init__(
        self,
        every: int,
        params: Sequence[VotingParam],
        *,
        n_workers: int,
        seed: int,
        earlier: Examiner | None,
        counted_rows: Sequence[int] | None = None,
    ) -> None:
        self._every = every
        self._params, self._n_turns = params, count_turns(params)
        self._n_workers, self._counted_rows = n_workers, counted_rows
        self._sample = draw_sample(params, seed)
        self._places = place_sample(self._sample, params)
        found = [] if earlier is None else earlier.found
        self._found: deque[Diagnosis] = deque(found, maxlen=_KEPT_MEASURES * len(params))

    @property
    def found(self) -> list[Diagnosis]:
        """All that was found, the oldest first; of many, the last ones."""
        return list(self._found)

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be diagnosed."""
        return step // self._n_turns % self._every == 0

    def plan(self, step: int) -> ByteCount:
        """Declare what each worker hands to the network for it in a step."""
        if not self.is_due(step):
            return ByteCount()
        turn = step % self._n_turns
        voting = [param.position for param in self._params if param.turn == turn]
        return plan_sample(2 * sum(len(self._sample[at]) for at in voting), self._n_workers)

    def list_numbers(self, segments: Mapping[int, Segment]) -> list[float]:
        """List a worker's directions and momenta at the sample, before the commit.

        Args:
            segments: By position. Where one has no gradient, its directions are ``ABSENT``.
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
        """Compare what all workers listed with what came back.

        Args:
            step: Counted from 0.
            rows: ``list_numbers`` of every worker, in rank order.
            replies: Of all parameters that were listed.
        """
        if self._counted_rows is not None:
            rows = [rows[row] for row in self._counted_rows]
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
        step: Counted from 0.
        name: The parameter's.
        rows: For each worker, its directions and then its momenta.
        updates: S of each element of the sample.

    Returns:
        None where nobody voted, or there is nothing to sample.
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

"""Measurements of the workers' agreement on each parameter, at intervals, and their stage."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distlion.errors import UnsupportedTypeError
from distlion.kernels.contract import Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.kernels.orthogonal import orthogonalize_directions
from distlion.step.agreement import (
    AGREEMENT_KEY,
    Counts,
    Exclusion,
    ReliabilityWatch,
    count_agreement,
    describe_agreement,
)
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.param import VotingParam
from distlion.step.settings import Settings
from distlion.step.stage import Stage, Surroundings
from distlion.step.staging import read_together
from distlion.votes.reply import ParameterReply
from distlion.votes.roster import Roster
from distlion.wire.frame import Header
from distlion.wire.numbers import gather_sample, plan_sample
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict

SAMPLE_ELEMENTS = 256
"""Sampled elements of each parameter; all elements of a smaller one."""


def draw_sample(params: Sequence[VotingParam], seed: int) -> list[Tensor]:
    """Draw elements of every parameter, with replacement where there are more than 256.

    Args:
        params: Parameters whose local momentum is sampled.
        seed: Seed, equal on all workers.

    Returns:
        Ascending indices for each parameter, (at most 256,) int64.
    """
    sample = []
    for position, size in enumerate(param.n_kept for param in params):
        # torch takes 63 bits of a seed.
        generator = torch.Generator().manual_seed((seed + position) % (1 << 63))
        drawn = torch.randint(max(1, size), (SAMPLE_ELEMENTS,), generator=generator, device="cpu")
        sample.append(
            torch.arange(size, device="cpu") if size <= SAMPLE_ELEMENTS else drawn.sort().values
        )
    return sample


def place_sample(sample: Sequence[Tensor], params: Sequence[VotingParam]) -> list[Tensor]:
    """Move the result of ``draw_sample`` to the parameters' devices."""
    return [index.to(params[position].device) for position, index in enumerate(sample)]


def measure_coherence(rows: Sequence[Sequence[float]]) -> float:
    """Measure the agreement of workers.

    Equation:
        ||(1 / N) sum_i m_i||^2 / ((1 / N) sum_i ||m_i||^2)
        1 where all are equal, about 1 / N where they have nothing in common; 1 where all are 0

    Args:
        rows: m_i, one row for each worker.
    """
    n = len(rows)
    mean_square = math.fsum(value * value for row in rows for value in row) / n
    square_of_mean = math.fsum((math.fsum(column) / n) ** 2 for column in zip(*rows, strict=True))
    return square_of_mean / mean_square if mean_square else 1.0


# Number of measurements kept for each parameter.
_KEPT_MEASURES = 1000
ABSENT = math.nan
"""Placeholder for the numbers of a worker without a gradient."""


@dataclass(frozen=True)
class Diagnosis:
    """The workers' agreement on one parameter in one step.

    Equation, for each element, over the n votes of the workers that count, repeated by weight:
        margin = |sum_i sign(c_i)| / n    tie: sum_i sign(c_i) = 0
        agreement: sign(S) = sign(sum_i c_i), where the latter is not 0: what global Lion would do
        coherence = ||mean_i m_i||^2 / mean_i ||m_i||^2, before the step
        agreement_of worker i: sign(c_i) = sign(sum_(j != i) sign(c_j)), where neither is 0

    Attributes:
        step: Number of the step, counted from 0.
        parameter: Name of the parameter.
        margin: Mean margin over the sample; 1 where all vote alike.
        ties: Share of ties in the sample.
        agreement: Share of agreement among elements with a direction; 1 where none has one.
        coherence: 1 where momenta are equal, about 1 / N where they have nothing in common; of
            deltas, without momenta, under ``LocalSteps``.
        agreement_of: For each worker, in rank order, its agreement with the majority of the others:
            of the elements where it has a direction and the others are not tied, the share on which
            both have one sign. Each worker counts once, whatever its weight. None for a worker that
            is absent or has no such element. With two workers, both have the same number.
        excluded: Workers whose votes did not count, with ``Agreement(on_disagreement="exclude")``.
    """

    step: int
    parameter: str
    margin: float
    ties: float
    agreement: float
    coherence: float
    agreement_of: tuple[float | None, ...]
    excluded: tuple[int, ...] = ()


class Examiner:
    """The diagnosis of an optimizer's votes every few steps.

    Args:
        every: Steps from one diagnosis to the next, the first step included.
        params: The trainable parameters.
        voters: Ids of the workers that vote, in rank order.
        seed: Seed of the sample, equal on all workers.
        earlier: An examiner of fewer parameters, whose findings are kept.
        counted_rows: Rows of workers, each as often as its vote counts.
        exclusion: The workers whose votes do not count; None if all count.
    """

    def __init__(
        self,
        every: int,
        params: Sequence[VotingParam],
        *,
        voters: tuple[int, ...],
        seed: int,
        earlier: Examiner | None,
        counted_rows: Sequence[int],
        exclusion: Exclusion | None = None,
    ) -> None:
        self._every = every
        self._params = params
        self._voters, self._counted_rows = voters, counted_rows
        self._exclusion = exclusion
        self._sample = draw_sample(params, seed)
        self._places = place_sample(self._sample, params)
        found = [] if earlier is None else earlier.found
        self._found: deque[Diagnosis] = deque(found, maxlen=_KEPT_MEASURES * len(params))
        self._watch = ReliabilityWatch(len(voters), excludes=exclusion is not None)
        # Other workers than before begin anew.
        if earlier is not None and earlier._voters == voters:
            self._watch = earlier._watch

    @classmethod
    def build(
        cls,
        settings: Settings,
        roster: Roster,
        groups: Sequence[dict[str, Any]],
        params: Sequence[VotingParam],
        *,
        earlier: Examiner | None,
    ) -> Examiner | None:
        """Build the diagnosis from the settings; None for none.

        Args:
            settings: The optimizer's settings.
            roster: The workers that vote.
            groups: Its param groups, where running agreements are kept.
            params: As for the class.
            earlier: As for the class.
        """
        excludes = settings.agreement.excludes
        if not excludes and groups:
            groups[0].pop(AGREEMENT_KEY, None)
        if settings.agreement.every is None:
            return None
        return cls(
            settings.agreement.every,
            params,
            voters=roster.ids,
            seed=settings.seed,
            earlier=earlier,
            counted_rows=roster.counted_rows,
            exclusion=Exclusion(groups, roster.ids) if excludes else None,
        )

    @property
    def excluded(self) -> frozenset[int]:
        """The workers whose next votes do not count, by place."""
        return frozenset() if self._exclusion is None else self._exclusion.find_excluded()

    def excludes(self, voter: int) -> bool:
        """Return whether a worker's next votes do not count, by its id."""
        return self._voters.index(voter) in self.excluded

    @property
    def found(self) -> list[Diagnosis]:
        """The latest findings, the oldest first."""
        return list(self._found)

    def is_due(self, step: int) -> bool:
        """Return whether a step is due for a diagnosis."""
        return step % self._every == 0

    def plan(self, step: int) -> ByteCount:
        """Declare the bytes that each worker sends for it in a step."""
        if not self.is_due(step):
            return ByteCount()
        return plan_sample(2 * sum(map(len, self._sample)), len(self._voters))

    def list_numbers(
        self, segments: Mapping[int, Segment], encoded: Mapping[int, Segment] | None = None
    ) -> list[float]:
        """List a worker's directions and momenta at the sample, before the commit.

        Args:
            segments: Segments by position. Without a gradient, directions are ``ABSENT``.
            encoded: Those that were encoded in their place, where matrices were made whole.
        """
        numbers: list[Tensor] = []
        for position, segment in sorted(segments.items()):
            index = self._places[position]
            m = segment.exp_avg.view(-1)[index].double()
            if segment.grad is None:
                directions = torch.full_like(m, ABSENT)
            else:
                # The same segment, but for a matrix whose direction is orthogonalized.
                kernels = choose_kernels(segment.param.device)
                given = segment if encoded is None else encoded.get(position, segment)
                [voted] = orthogonalize_directions(kernels, [given])
                assert voted.grad is not None
                hyper = voted.coefficients
                g = voted.grad.view(-1)[index].double() * hyper.grad_scale
                before = voted.exp_avg.view(-1)[index].double()
                directions = hyper.beta1 * before + (1 - hyper.beta1) * g
                if hyper.cautious:
                    directions = directions.where(directions.sign() == g.sign(), 0.0)
            if not self._params[position].keeps_momentum:
                m = directions.nan_to_num(0.0)
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
        at, counts, excluded = 0, [], self.excluded
        counted = [row for row in self._counted_rows if row not in excluded]
        for reply in sorted(replies, key=lambda each: each.position):
            index = self._sample[reply.position]
            n = len(index)
            mine = [row[at : at + 2 * n] for row in rows]
            at += 2 * n
            updates = reply.read(index.to(reply.packed.device))
            counts.append(count_agreement([row[:n] for row in mine]))
            mine = [mine[row] for row in counted]
            name = self._params[reply.position].name
            found = diagnose(step, name, mine, updates, counts=counts[-1])
            if found is not None:
                self._found.append(replace(found, excluded=tuple(sorted(excluded))))
        self._watch.observe(step, counts)
        if self._exclusion is not None:
            self._exclusion.observe(step, counts, _find_absent(rows))

    def warn(self) -> None:
        """Log and warn of workers that disagree with the others; between steps."""
        if self._exclusion is not None:
            self._exclusion.log_changes()
        self._watch.warn()


class Examination(Stage):
    """Measure the workers' agreement every few steps, and leave out those that disagree.

    Args:
        examiner: The diagnosis of votes.
        voter: The id of this rank's worker.
        between: The link between voters.
        inside: The link between the ranks of this worker; None for a worker of one rank.
    """

    def __init__(
        self, examiner: Examiner, voter: int, between: Transport, inside: Transport | None
    ) -> None:
        self.examiner, self._voter, self._between, self._inside = examiner, voter, between, inside
        self._samples: Sequence[Sequence[float]] | None = None
        self._step = 0

    def amend(self, inputs: StepInputs) -> StepInputs:
        """Let the votes of an excluded worker not count, and keep directions to measure."""
        return replace(
            inputs,
            is_excluded=self.examiner.excludes(self._voter),
            keeps_directions=self.examiner.is_due(inputs.header.step),
        )

    def exchange(self, buckets: Sequence[Bucket], header: Header) -> tuple[Header, Verdict]:
        """Gather every worker's sample, before momenta move."""
        self._step = header.step
        if self.examiner.is_due(header.step):
            segments, encoded = {}, {}
            for bucket in buckets:
                for index, param in enumerate(bucket.own):
                    segments[param.position] = bucket.segments[index]
                    if bucket.directions is not None:
                        encoded[param.position] = bucket.directions[index]
            numbers = self.examiner.list_numbers(segments, encoded)
            header, self._samples = gather_sample(self._between, self._inside, numbers, header)
        return header, Verdict.of(header)

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Compare the samples with the replies."""
        if self._samples is not None:
            replies = [reply for bucket in buckets for reply in bucket.list_replies()]
            self.examiner.conclude(self._step, self._samples, replies)

    def end(self) -> None:
        """Release the samples."""
        self._samples = None

    def warn(self) -> None:
        """Warn of workers that disagree, each once."""
        self.examiner.warn()

    def plan(self, step: int) -> ByteCount:
        return self.examiner.plan(step)

    def describe_kept(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        return describe_agreement(groups)


def build_examination(
    settings: Settings, among: Surroundings, earlier: Sequence[Stage]
) -> Examination | None:
    """Build the stage; None if nothing is measured.

    Args:
        settings: The optimizer's settings.
        among: The other parts of the optimizer.
        earlier: The stages for fewer parameters, whose findings are kept.

    Raises:
        InvalidArgumentError: ``agreement`` does not suit a rule.
        UnsupportedTypeError: Several ranks act as one worker, which cannot be left out.
    """
    ranks = among.ranks
    if settings.agreement.excludes and len(ranks.inside) > 1:
        raise UnsupportedTypeError(
            f"{settings.agreement}, and {len(ranks.inside)} ranks act as one worker (nodes= or "
            "shards). Each of them compares only its own part of the parameters. Expected workers "
            "of one rank. Use on_disagreement='warn'"
        )
    before = next((each.examiner for each in earlier if isinstance(each, Examination)), None)
    examiner = Examiner.build(settings, ranks.roster, among.groups, among.params, earlier=before)
    if examiner is None or ranks.roster.n_voters == 1 or among.between is None:
        return None
    return Examination(examiner, ranks.voter, among.between, among.inside)


def _find_absent(rows: Sequence[Sequence[float]]) -> list[int]:
    """Find the places of workers without a vote: all directions, half of the numbers, are NaN."""
    return [place for place, row in enumerate(rows) if 2 * sum(map(math.isnan, row)) == len(row)]


def diagnose(
    step: int,
    name: str,
    rows: Sequence[Sequence[float]],
    updates: Sequence[int],
    *,
    counts: Counts,
) -> Diagnosis | None:
    """Compare the workers on one parameter.

    Args:
        step: Number of the step, counted from 0.
        name: Name of the parameter.
        rows: For each worker, its directions and then its momenta.
        updates: S of each element of the sample.
        counts: ``count_agreement`` of the directions.

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
        coherence=measure_coherence([row[n:] for row in rows]),
        agreement_of=tuple(agreed / compared if compared else None for agreed, compared in counts),
    )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

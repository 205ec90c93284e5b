"""Exchanges between a vote and its commit: diagnoses and averages of momenta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distlion.errors import UnsupportedTypeError
from distlion.kernels.contract import Kernels, Segment
from distlion.step.agreement import describe_agreement
from distlion.step.bucket import Bucket
from distlion.step.diagnostics import Diagnosis, Examiner
from distlion.step.momentum import AveragedMomenta, MomentumStage, describe_selection
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.wire.all_reduce import AllReduce
from distlion.wire.frame import Header
from distlion.wire.numbers import gather_sample
from distlion.wire.pattern import Exchange
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class FollowedUp:
    """The results of one step, to be written once the step is committed.

    Attributes:
        averaged: The verdict of all workers, and the averaged momenta.
        samples: Every worker's numbers for a diagnosis; None where none is due.
    """

    averaged: AveragedMomenta
    samples: Sequence[Numbers] | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of all workers."""
        return self.averaged.verdict


class FollowUp:
    """Diagnosis and momentum synchronization of an optimizer with several voters.

    Args:
        pattern: The exchange pattern for momenta.
        voter: The id of this rank's worker.
        groups: The optimizer's param groups.
        params: The trainable parameters.
        momenta: The schedule of averaged momenta; None for none.
        examiner: The diagnosis of votes; None for none.
    """

    def __init__(
        self,
        pattern: Exchange,
        voter: int,
        groups: Sequence[dict[str, Any]],
        params: Sequence[VotingParam],
        *,
        momenta: MomentumStage | None,
        examiner: Examiner | None,
    ) -> None:
        self._pattern, self._voter = pattern, voter
        self._groups, self._params = groups, params
        self._momenta, self._examiner = momenta, examiner

    @classmethod
    def build(
        cls,
        settings: Settings,
        ranks: Ranks,
        groups: Sequence[dict[str, Any]],
        params: Sequence[VotingParam],
        *,
        earlier: FollowUp | None,
    ) -> FollowUp | None:
        """Build the follow-up from the settings; None if nothing follows a vote.

        Args:
            settings: The optimizer's settings.
            ranks: The optimizer's ranks.
            groups: As for the class.
            params: As for the class.
            earlier: A follow-up of fewer parameters, whose diagnoses are kept.

        Raises:
            InvalidArgumentError: ``momentum_sync`` selects nothing, or ``on_disagreement`` does not
                suit a rule.
            UnsupportedTypeError: ``on_disagreement`` or ``momentum_sync`` does not suit ranks that
                act as one worker.
        """
        n_voters, seed = ranks.roster.n_voters, settings.seed
        momenta = None
        if settings.momentum_sync is not None:
            _refuse_copies(params)
            momenta = MomentumStage(
                settings.momentum_sync, groups, params, n_workers=n_voters, seed=seed
            )
        if settings.on_disagreement == "exclude" and len(ranks.inside) > 1:
            raise UnsupportedTypeError(
                f"on_disagreement='exclude', and {len(ranks.inside)} ranks act as one worker "
                "(nodes= or shards). Each of them compares only its own part of the parameters. "
                "Expected workers of one rank. Use on_disagreement='warn'"
            )
        before = None if earlier is None else earlier._examiner
        examiner = Examiner.build(settings, ranks.roster, groups, params, earlier=before)
        if n_voters == 1 or (momenta is None and examiner is None):
            return None
        # "auto" chooses for buckets of votes only.
        pattern = AllReduce() if settings.exchange == "auto" else settings.exchange
        return cls(pattern, ranks.voter, groups, params, momenta=momenta, examiner=examiner)

    @property
    def excludes_this_worker(self) -> bool:
        """True if this worker's next votes do not count."""
        return self._examiner is not None and self._examiner.excludes(self._voter)

    def examines(self, step: int) -> bool:
        """Return whether a step is due for a diagnosis."""
        return self._examiner is not None and self._examiner.is_due(step)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The diagnoses so far, the oldest first."""
        return [] if self._examiner is None else self._examiner.found

    def plan(self, step: int) -> ByteCount:
        """Declare the bytes that this rank sends for it, if the vote succeeds."""
        plan = ByteCount()
        if self._examiner is not None:
            plan += self._examiner.plan(step)
        if self._momenta is not None:
            plan += self._momenta.plan(step, self._pattern, self._voter)
        return plan

    def exchange(
        self,
        buckets: Sequence[Bucket],
        header: Header,
        link: Transport | None,
        inside: Transport | None,
    ) -> FollowedUp:
        """Exchange what is due after a successful vote: 1 a sample to diagnose, 2 momenta.

        This comes before the commit, so that a step stays atomic, and sends the commit's results.

        Args:
            buckets: The buckets of the step, with their replies.
            header: This rank's header.
            link: The link between the ranks that vote with each other.
            inside: The link between the ranks of this worker; None for a worker of one rank.
        """
        segments = _list_segments(buckets)
        assert link is not None  # votes have crossed it

        # 1 a sample to diagnose
        samples = None
        if self._examiner is not None and self._examiner.is_due(header.step):
            numbers = self._examiner.list_numbers(
                {position: segment for position, (segment, _) in segments.items()},
                _list_encoded(buckets),
            )
            header, samples = gather_sample(link, inside, numbers, header)

        # 2 momenta
        if self._momenta is None:
            return FollowedUp(AveragedMomenta(Verdict.of(header)), samples)
        header = replace(header, bucket=len(buckets))
        averaged = self._momenta.exchange(segments, link, self._pattern, header, inside)
        return FollowedUp(averaged, samples)

    def commit(self, followed: FollowedUp, buckets: Sequence[Bucket], step: int) -> None:
        """Write momenta, and remember diagnoses.

        Args:
            followed: The result of ``exchange``.
            buckets: The buckets of the step, which are committed.
            step: The committed step.
        """
        for part, mean in followed.averaged.means:
            part.of(self._params[part.position].exp_avg).copy_(mean)
        if followed.averaged.selected is not None:
            assert self._momenta is not None
            self._momenta.remember(followed.averaged.selected, self._groups)
        if followed.samples is not None:
            assert self._examiner is not None
            replies = [reply for bucket in buckets for reply in bucket.list_replies()]
            self._examiner.conclude(step, followed.samples, replies)

    def warn(self) -> None:
        """Warn of workers that the diagnoses name, each once; after a step, which is then whole."""
        if self._examiner is not None:
            self._examiner.warn()


def describe_kept(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line for each thing that averages and diagnoses keep in param groups."""
    return describe_selection(groups) + describe_agreement(groups)


def _refuse_copies(params: Sequence[VotingParam]) -> None:
    """Refuse to average momenta if ranks of one worker hold copies of them.

    The slices and their rounding depend on a rank's other momenta, so that copies would diverge,
    and with them the parameters.
    """
    copied = next((param for param in params if param.copies.n > 1), None)
    if copied is not None:
        raise UnsupportedTypeError(
            f"momentum_sync, and {copied.copies.n} ranks of each worker hold copies of "
            f"{copied.name} (tensor parallelism leaves it whole): their momenta would diverge; "
            "leave momentum_sync out"
        )


def _list_segments(buckets: Sequence[Bucket]) -> dict[int, tuple[Segment, Kernels]]:
    """List this rank's segments by position, each with its arithmetic."""
    listed: dict[int, tuple[Segment, Kernels]] = {}
    for bucket in buckets:
        for param, segment in zip(bucket.own, bucket.segments, strict=True):
            listed[param.position] = (segment, bucket.kernels)
    return listed


def _list_encoded(buckets: Sequence[Bucket]) -> dict[int, Segment]:
    """List by position the segments that were encoded, where matrices were made whole."""
    return {
        param.position: segment
        for bucket in buckets
        for param, segment in zip(bucket.own, bucket.directions or (), strict=False)
    }

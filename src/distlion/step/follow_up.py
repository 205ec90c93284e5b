"""Exchanges between a vote and its commit: diagnoses and averages of momenta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distlion.errors import UnsupportedTypeError
from distlion.kernels.contract import Kernels, Segment
from distlion.step.diagnostics import Diagnosis, Examiner
from distlion.step.momentum import AveragedMomenta, MomentumStage
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.step.vote import CastVote
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
        momenta: The schedule of averaged momenta; None for none.
        examiner: The diagnosis of votes; None for none.
    """

    def __init__(
        self,
        pattern: Exchange,
        voter: int,
        *,
        momenta: MomentumStage | None,
        examiner: Examiner | None,
    ) -> None:
        self._pattern, self._voter = pattern, voter
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
            groups: The optimizer's param groups.
            params: The trainable parameters.
            earlier: A follow-up of fewer parameters, whose diagnoses are kept.

        Raises:
            InvalidArgumentError: ``momentum_sync`` selects nothing, or ``on_disagreement`` does not
                suit a rule.
            UnsupportedTypeError: ``on_disagreement`` does not suit ranks that act as one worker.
        """
        n_voters = ranks.roster.n_voters
        momenta = None
        if settings.momentum_sync is not None:
            momenta = MomentumStage(settings.momentum_sync, params, n_workers=n_voters)
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
        return cls(pattern, ranks.voter, momenta=momenta, examiner=examiner)

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
        votes: Sequence[CastVote],
        header: Header,
        link: Transport | None,
        inside: Transport | None,
    ) -> FollowedUp:
        """Exchange what is due after a successful vote: 1 a sample to diagnose, 2 momenta.

        This comes before the commit, so that a step stays atomic, and sends the commit's results.

        Args:
            votes: The votes of the step, one for each bucket.
            header: This rank's header.
            link: The link between the ranks that vote with each other.
            inside: The link between the ranks of this worker; None for a worker of one rank.
        """
        segments = _list_segments(votes)
        assert link is not None  # votes have crossed it

        # 1 a sample to diagnose
        samples = None
        if self._examiner is not None and self._examiner.is_due(header.step):
            numbers = self._examiner.list_numbers(
                {position: segment for position, (segment, _) in segments.items()},
                _list_encoded(votes),
            )
            header, samples = gather_sample(link, inside, numbers, header)

        # 2 momenta
        if self._momenta is None:
            return FollowedUp(AveragedMomenta(Verdict.of(header)), samples)
        header = replace(header, bucket=len(votes))
        averaged = self._momenta.exchange(segments, link, self._pattern, header, inside)
        return FollowedUp(averaged, samples)

    def commit(self, followed: FollowedUp, votes: Sequence[CastVote], step: int) -> None:
        """Write momenta, and remember diagnoses.

        Args:
            followed: The result of ``exchange``.
            votes: The committed votes of the step.
            step: The committed step.
        """
        for param, mean in followed.averaged.means:
            param.exp_avg.view(-1).copy_(mean)
        if followed.samples is not None:
            assert self._examiner is not None
            replies = [
                reply for vote in votes for reply in vote.draft.route.list_replies(vote.reply)
            ]
            self._examiner.conclude(step, followed.samples, replies)

    def warn(self) -> None:
        """Warn of workers that the diagnoses name, each once; after a step, which is then whole."""
        if self._examiner is not None:
            self._examiner.warn()


def _list_segments(votes: Sequence[CastVote]) -> dict[int, tuple[Segment, Kernels]]:
    """List this rank's segments by position, each with its arithmetic."""
    listed: dict[int, tuple[Segment, Kernels]] = {}
    for vote in votes:
        route, segments = vote.draft.route, vote.draft.segments
        for index, param in enumerate(route.own):
            listed[param.position] = (segments[index], route.kernels)
    return listed


def _list_encoded(votes: Sequence[CastVote]) -> dict[int, Segment]:
    """List by position the segments that were encoded, where matrices were made whole."""
    return {
        param.position: segment
        for vote in votes
        for param, segment in zip(vote.draft.route.own, vote.draft.directions or (), strict=False)
    }

"""Exchanges between a vote and its commit: diagnoses, and momenta that are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distlion.errors import UnsupportedTypeError
from distlion.exchange import AllReduce, Exchange, Header, Verdict, gather_sample
from distlion.kernels import Kernels, Segment
from distlion.options.diagnostics import Diagnosis, Examiner
from distlion.options.momentum_stage import AveragedMomenta, MomentumStage
from distlion.options.settings import Settings
from distlion.step import CastVote, Ranks, VotingParam
from distlion.transport import ByteCount, Transport

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class FollowedUp:
    """The results of one step, to be written once the step is committed.

    Attributes:
        averaged: What all workers found, and the momenta.
        samples: What every worker listed for a diagnosis; None where none is due.
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
        pattern: Which bytes of momenta go to whom.
        voter: The id of this rank's worker.
        groups: The optimizer's param groups.
        params: The trainable parameters.
        momenta: Which momenta move in which step; None for none.
        examiner: What diagnoses votes; None for nothing.
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
        """Build what the settings ask for; None where a vote is followed by nothing.

        Args:
            settings: The optimizer's.
            ranks: Those of the optimizer.
            groups: As for the class.
            params: As for the class.
            earlier: One of fewer parameters; what it diagnosed is kept.

        Raises:
            InvalidArgumentError: ``momentum_sync`` selects nothing.
        """
        n_voters, seed = ranks.roster.n_voters, settings.seed
        momenta = examiner = None
        if settings.momentum_sync is not None:
            _refuse_copies(params)
            momenta = MomentumStage(
                settings.momentum_sync, groups, params, n_workers=n_voters, seed=seed
            )
        if settings.diagnose_every is not None:
            before = None if earlier is None else earlier._examiner
            examiner = Examiner(
                settings.diagnose_every,
                params,
                n_workers=n_voters,
                seed=seed,
                earlier=before,
                counted_rows=ranks.roster.counted_rows if ranks.roster.is_weighted else None,
            )
        if n_voters == 1 or (momenta is None and examiner is None):
            return None
        # "auto" chooses for buckets of votes.
        pattern = AllReduce() if settings.exchange == "auto" else settings.exchange
        return cls(pattern, ranks.voter, groups, params, momenta=momenta, examiner=examiner)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The diagnoses so far, the oldest first."""
        return [] if self._examiner is None else self._examiner.found

    def plan(self, step: int) -> ByteCount:
        """Declare what this rank will hand to the network for it, if the vote succeeds."""
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
        """Exchange what is due after a vote that succeeded: 1 a sample to diagnose, 2 momenta.

        Before the commit, so that a step stays atomic: what is sent is what the commit will make.

        Args:
            votes: Those of the step, one for each bucket.
            header: This rank's.
            link: Between the ranks that vote with each other.
            inside: Between the ranks of this worker; None if the worker has a single rank.
        """
        segments = _list_segments(votes)
        assert link is not None  # votes have crossed it

        # 1 a sample to diagnose
        samples = None
        if self._examiner is not None and self._examiner.is_due(header.step):
            numbers = self._examiner.list_numbers(
                {position: segment for position, (segment, _) in segments.items()}
            )
            header, samples = gather_sample(link, inside, numbers, header)

        # 2 momenta
        if self._momenta is None:
            return FollowedUp(AveragedMomenta(Verdict.of(header)), samples)
        header = replace(header, bucket=len(votes))
        averaged = self._momenta.exchange(segments, link, self._pattern, header, inside)
        return FollowedUp(averaged, samples)

    def commit(self, followed: FollowedUp, votes: Sequence[CastVote], step: int) -> None:
        """Write momenta, and remember what was found.

        Args:
            followed: As ``exchange`` returned it.
            votes: Those of the step, committed.
            step: The one that was committed.
        """
        for part, mean in followed.averaged.means:
            part.of(self._params[part.position].exp_avg).copy_(mean)
        if followed.averaged.selected is not None:
            assert self._momenta is not None
            self._momenta.remember(followed.averaged.selected, self._groups)
        if followed.samples is not None:
            assert self._examiner is not None
            replies = [
                reply for vote in votes for reply in vote.draft.route.list_replies(vote.reply)
            ]
            self._examiner.conclude(step, followed.samples, replies)


def _refuse_copies(params: Sequence[VotingParam]) -> None:
    """Refuse to average momenta of which ranks of one worker hold copies.

    What moves, and how it is rounded, goes by the other momenta of a rank, so that copies would
    drift apart, and with them the parameters.
    """
    copied = next((param for param in params if param.copies.n > 1), None)
    if copied is not None:
        raise UnsupportedTypeError(
            f"momentum_sync, and {copied.copies.n} ranks of each worker hold the same of "
            f"{copied.name} (tensor parallelism leaves it whole): their momenta would drift apart; "
            "leave momentum_sync out"
        )


def _list_segments(votes: Sequence[CastVote]) -> dict[int, tuple[Segment, Kernels]]:
    """List what this rank votes with by position, each with its arithmetic."""
    listed: dict[int, tuple[Segment, Kernels]] = {}
    for vote in votes:
        route, segments = vote.draft.route, vote.draft.segments
        for index, param in enumerate(route.own):
            listed[param.position] = (segments[index], route.kernels)
    return listed

"""What follows a vote and precedes its commit: diagnoses, and momenta that are averaged."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from distlion.exchange import ByteCount, Header, Status, Verdict, gather_sample
from distlion.kernels import Kernels, Segment
from distlion.voting.diagnostics import Diagnosis, Examiner
from distlion.voting.momentum_stage import AveragedMomenta, MomentumStage
from distlion.voting.network import VotingNetwork
from distlion.voting.settings import Settings
from distlion.voting.vote import BucketVote

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class FollowedUp:
    """What came of it in one step, to be written once the step is committed.

    Attributes:
        averaged: What all workers found, and the momenta.
        samples: What every worker listed for a diagnosis; None where none is due.
    """

    averaged: AveragedMomenta
    samples: Sequence[Numbers] | None = None

    @property
    def verdict(self) -> Verdict:
        """What all workers found."""
        return self.averaged.verdict


class FollowUp:
    """Diagnosis and momentum synchronisation of an optimizer with several voters.

    Args:
        settings: The optimizer's.
        network: Its links and routes.
        groups: Its param groups.
        params: The trainable parameters.
        names: Their names.
        sizes: Coordinates of the momentum that is kept here of each.
        earlier: One of fewer parameters; what it diagnosed is kept.

    Raises:
        InvalidArgumentError: ``momentum_sync`` selects nothing.
    """

    def __init__(
        self,
        settings: Settings,
        network: VotingNetwork,
        groups: Sequence[dict[str, Any]],
        params: Sequence[Tensor],
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        earlier: FollowUp | None,
    ) -> None:
        self._network, self._groups, self._params = network, groups, params
        self._momenta = self._examiner = None
        shared: dict[str, Any] = {"n_workers": network.n_voters, "seed": settings.seed}
        if settings.momentum_sync is not None:
            stage = MomentumStage(settings.momentum_sync, groups, params, names, sizes, **shared)
            self._momenta = stage if network.n_voters > 1 else None
        if settings.diagnose_every is not None and network.n_voters > 1:
            before = None if earlier is None else earlier._examiner
            self._examiner = Examiner(
                settings.diagnose_every, names, sizes, **shared, earlier=before
            )

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What was found so far, the oldest first."""
        return [] if self._examiner is None else self._examiner.found

    def plan(self, step: int) -> ByteCount:
        """Declare what this rank will hand to the network for it, if the vote succeeds."""
        plan = ByteCount()
        if self._examiner is not None:
            plan += self._examiner.plan(step)
        if self._momenta is not None:
            pattern = self._network.momentum_pattern
            plan += self._momenta.plan(step, pattern, self._network.voter)
        return plan

    def exchange(self, votes: Sequence[BucketVote], header: Header) -> FollowedUp:
        """Exchange what is due in this step: 1 a sample to diagnose, 2 momenta.

        Nothing where a vote failed, which all workers know.
        """
        if any(vote.verdict.status is not Status.OK for vote in votes):
            return FollowedUp(AveragedMomenta(Verdict(Status.OK)))
        segments = _list_segments(votes)
        links = self._network.between
        inside = self._network.inside.get(self._params[0].device)

        # 1 a sample to diagnose
        samples = None
        if self._examiner is not None and self._examiner.is_due(header.step):
            numbers = self._examiner.list_numbers(
                {position: segment for position, (segment, _) in segments.items()}
            )
            link = next(iter(links.values()))
            header, samples = gather_sample(link, inside, numbers, header)

        # 2 momenta
        if self._momenta is None:
            return FollowedUp(AveragedMomenta(Verdict.of(header)), samples)
        header = replace(header, bucket=len(self._network.routes))
        pattern = self._network.momentum_pattern
        averaged = self._momenta.exchange(segments, links, pattern, header, inside)
        return FollowedUp(averaged, samples)

    def commit(
        self,
        followed: FollowedUp,
        votes: Sequence[BucketVote],
        state: Mapping[Tensor, MutableMapping[str, Any]],
        step: int,
    ) -> None:
        """Write momenta, and remember what was found.

        Args:
            followed: As ``exchange`` returned it.
            votes: Those of the step, committed.
            state: The optimizer's.
            step: The one that was committed.
        """
        for part, mean in followed.averaged.means:
            part.of(state[self._params[part.position]]["exp_avg"]).copy_(mean)
        if followed.averaged.selected is not None:
            assert self._momenta is not None
            self._momenta.remember(followed.averaged.selected, self._groups, self._params)
        if followed.samples is not None:
            assert self._examiner is not None
            replies = [reply for vote in votes for reply in vote.list_replies()]
            self._examiner.conclude(step, followed.samples, replies)


def _list_segments(votes: Sequence[BucketVote]) -> dict[int, tuple[Segment, Kernels]]:
    return {
        position: (segment, vote.draft.route.kernels)
        for vote in votes
        for position, segment in zip(
            vote.draft.route.ballot.members, vote.draft.segments, strict=True
        )
    }

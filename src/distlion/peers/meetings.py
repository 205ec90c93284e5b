"""Calls that all ranks make together between two steps, and the end of a failed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from distlion.errors import CheckpointError
from distlion.failures import Status
from distlion.kernels.coin import Coins
from distlion.peers.connections import Connections
from distlion.peers.fingerprint import digest_settings
from distlion.peers.handshake import CALL, explain_verdict, share_problem, share_said
from distlion.peers.routing import Routing
from distlion.step.outcome import explain
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.step.traffic import TrafficMeter
from distlion.step.vote import abstain_from_all, judge_votes
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.verdict import Verdict


class Meetings:
    """Let all ranks of an optimizer agree on a call before they make it.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        connections: Its process groups.
        routing: Its routes.
        meter: Its meter, which ignores the bytes of meetings.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        connections: Connections,
        routing: Routing,
        meter: TrafficMeter,
    ) -> None:
        self._ranks, self._settings = ranks, settings
        self._connections, self._routing, self._meter = connections, routing, meter

    def meet(
        self, call: str, lines: Sequence[str], *, step: int, next_step: int | None = None
    ) -> None:
        """Meet all ranks before collectives outside of steps, by a step in which nobody votes.

        Without it, this call on one rank and ``step()`` on another would pair collectives of
        different sizes, which can abort a process inside Gloo. Here a peer at another call or
        another step sees different settings, and all ranks raise, with nothing changed.

        Args:
            call: The call that this rank is at.
            lines: Lines that must be equal on all ranks.
            step: The step that errors name.
            next_step: The step that must be equal; None for the same.
        """
        ranks = self._ranks
        if ranks.is_alone:
            return
        lines = [f"{CALL}{call}", *lines]
        agreed = step if next_step is None else next_step
        digest = digest_settings(lines)
        header = Header(ChunkKind.VOTE, agreed, 0, 0, digest, epoch=ranks.roster.epoch)
        votes = abstain_from_all(
            self._routing.take_turn(step),
            header,
            Coins(self._settings.seed, agreed, ranks.voter),
            nonfinite=self._settings.nonfinite,
            clipper=self._routing.clipper,
        )
        verdict = self.settle(judge_votes(votes), header)
        self._meter.discard()
        if verdict.status is not Status.OK:
            self.fail(verdict, lines, [], step=step)

    def agree(
        self, call: str, problem: CheckpointError | None, *, step: int, said: str = ""
    ) -> None:
        """Meet all ranks, and check that all of them can make the coming call.

        Args:
            call: The call that this rank is at.
            problem: Reason why it cannot go on; None for none.
            step: The step that errors name.
            said: A line that must be equal on all ranks; "" on all of them for none.

        Raises:
            CheckpointError: Some rank has a problem, or a different line; the same on every rank,
                and all can go on.
            ConfigMismatchError: Another rank is at a different call; on every rank.
        """
        if self._ranks.is_alone:
            agree_alone(call, problem)
            return
        self.meet(call, [], step=step)
        link = self._connections.link_all(self._settings.step_timeout_s)
        share_problem(link, problem, call=call, step=step)
        if said:
            share_said(link, said, call=call, step=step)

    def settle(self, verdict: Verdict, header: Header) -> Verdict:
        """Share a verdict among the ranks that hold this worker's shards.

        A step is one transaction over all shards: an error on one of them prevents the commit of
        all.

        Args:
            verdict: The verdict on this rank's shards.
            header: The step's header, without an error.
        """
        inside = self._routing.inside
        if inside is None or not self._ranks.is_sharded:
            return verdict
        return share_verdict(inside, verdict, header, n_voters=self._ranks.roster.n_voters)

    def fail(
        self,
        verdict: Verdict,
        lines: Sequence[str],
        params: Sequence[VotingParam],
        problem: str = "",
        *,
        step: int,
    ) -> NoReturn:
        """Raise the error of a verdict, the same on all ranks; all of them must call it.

        Args:
            verdict: The verdict of all ranks.
            lines: Lines that must be equal on all of them.
            params: The trainable parameters.
            problem: Reason why this rank cannot vote; "" for none.
            step: The step that was abandoned.
        """
        if not self._ranks.is_alone:
            link = self._connections.link_all(self._settings.step_timeout_s)
            explain_verdict(link, verdict, lines, problem, step=step)
        raise explain(verdict, params, problem, rank=self._ranks.rank, step=step)


def agree_alone(call: str, problem: CheckpointError | None) -> None:
    """Raise if the only process cannot make a call; it can go on afterwards."""
    if problem is not None:
        problem.is_recoverable = True
        raise problem

"""Calls that all ranks make together between two steps, and what a failed step ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from distlion.errors import CheckpointError
from distlion.exchange import ChunkKind, Header, Verdict, share_verdict
from distlion.failures import Status
from distlion.kernels import Coins
from distlion.options import Settings
from distlion.session.connections import Connections
from distlion.session.fingerprint import digest_settings
from distlion.session.handshake import CALL, explain_verdict, share_problem, share_said
from distlion.session.routing import Routing
from distlion.step import Ranks, TrafficMeter, VotingParam, abstain_from_all, explain, judge_votes


class Meetings:
    """Let all ranks of an optimizer agree on a call before they make it.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's.
        connections: Its process groups.
        routing: Its routes.
        meter: Forgets what is sent: a meeting is no step.
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
        """Meet all ranks before collectives out of turn: a step in which nobody votes.

        The same call on one rank while another is at ``step()`` would pair collectives of different
        sizes, which can abort a process inside Gloo. Here a peer that is at another call, or at
        another step, sees other settings, and all ranks raise, with nothing changed.

        Args:
            call: The call that this rank is at.
            lines: What must be equal on all ranks.
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
        """Meet all ranks, and hear whether any of them cannot do what all are about to do.

        Args:
            call: The call that this rank is at.
            problem: What keeps it from going on; None for nothing.
            step: The step that errors name.
            said: What must be equal on all ranks, in one line; "" for nothing, on all of them.

        Raises:
            CheckpointError: Some rank has a problem, or says something else; the same on every
                rank, which may go on.
            ConfigMismatchError: Another rank is at another call; on every rank.
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

        A step is one transaction over all shards: what was found on one of them keeps all from
        their commit.

        Args:
            verdict: What was found on this rank's shards.
            header: Of the step, without an error.
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
        """Raise what a verdict says, the same on all ranks; all of them must call it.

        Args:
            verdict: What all ranks found.
            lines: What must be equal on all of them.
            params: The trainable parameters.
            problem: What keeps this rank from voting, in words; "" for nothing.
            step: The step that was abandoned.
        """
        if not self._ranks.is_alone:
            link = self._connections.link_all(self._settings.step_timeout_s)
            explain_verdict(link, verdict, lines, problem, step=step)
        raise explain(verdict, params, problem, rank=self._ranks.rank, step=step)


def agree_alone(call: str, problem: CheckpointError | None) -> None:
    """Raise what keeps the only process from a call, after which it may go on."""
    if problem is not None:
        problem.is_recoverable = True
        raise problem

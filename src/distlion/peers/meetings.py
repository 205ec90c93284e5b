"""Calls that all ranks make together between two steps, and the end of a failed step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

from distlion.errors import CheckpointError, ConfigMismatchError
from distlion.failures import Status, make_error, name_ranks
from distlion.peers.connections import Connections
from distlion.peers.routing import Routing
from distlion.step.outcome import explain
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.wire.ask import ask_texts, find_difference, find_problem, name_holders
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.tcp import WIRE_VARIABLE
from distlion.wire.transport import Transport
from distlion.wire.verdict import Verdict, minority

_CALL, _WIRE = "call: ", "wire: "


class Meetings:
    """Let all ranks of an optimizer agree on a call before they make it.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        connections: Its process groups.
        routing: Its routes.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        connections: Connections,
        routing: Routing,
    ) -> None:
        self._ranks, self._settings = ranks, settings
        self._connections, self._routing = connections, routing

    def meet(
        self, call: str, lines: Sequence[str], *, step: int, next_step: int | None = None
    ) -> None:
        """Meet all ranks before collectives outside of steps.

        Without it, two calls would pair collectives of different sizes, which can abort a process
        inside Gloo. A question begins with messages of one size, and votes have connections of
        their own: a rank at ``step()`` is noticed by its turn.

        Args:
            call: The call that this rank is at.
            lines: Lines that must be equal on all ranks.
            step: The step that errors name.
            next_step: The step that must be equal; None for the same.

        Raises:
            StepMismatchError: Another rank is at another step; on every rank.
            ConfigMismatchError: Another rank is at another call, or has other lines; on every rank.
        """
        if self._ranks.is_alone:
            return
        link, agreed = self._link(), step if next_step is None else next_step
        texts = ask_texts(link, "\n".join([f"step {agreed}", f"{_CALL}{call}", *lines]), step=step)
        steps = [text.split("\n", 1)[0] for text in texts]
        if len(set(steps)) > 1:
            raise make_error(
                Status.STEP,
                rank=link.rank,
                step=step,
                culprits=minority(steps),
                steps=", ".join(f"rank {rank}: {said}" for rank, said in enumerate(steps)),
            )
        _refuse_difference(link, texts, step=step)

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
        link = self._link()
        lost = self._connections.lost_checkpoints
        own = json.dumps(["" if problem is None else str(problem), said, lost])
        told = [json.loads(text) for text in ask_texts(link, own, step=step)]
        if any(row[2] for row in told):  # a save in the background has failed on some rank
            self._connections.disconnect_for_checkpoints()
        culprits, first = find_problem([row[0] for row in told])
        reason = f"on {name_ranks(culprits)}, and nothing was changed anywhere: {first}"
        if not culprits:
            lines = [row[1] for row in told]
            if len(set(lines)) == 1:
                return
            reason = (
                f"and nothing was changed anywhere: workers differ ({name_holders(lines)}). "
                "Expected the same on all. Give all of them the same call and arguments, and load "
                "what was saved together"
            )
        error = CheckpointError(f"[rank {link.rank}, step {step}] {call} was refused {reason}")
        error.is_recoverable = True
        raise error from problem

    def share_verdict(self, verdict: Verdict, header: Header) -> Verdict:
        """Share a verdict among the ranks that hold this worker's shards, or are a crew's member.

        A step is one transaction over all shards: an error on one of them prevents the commit of
        all.

        Args:
            verdict: The verdict on this rank's shards.
            header: The step's header, without an error.
        """
        inside, ranks = self._routing.inside, self._ranks
        if inside is None or not (ranks.is_sharded or ranks.come_and_go):
            return verdict
        # In a node, replies have told each rank what the others know of their peers.
        n_known = ranks.roster.n_voters if ranks.is_sharded else ranks.n_ranks
        return share_verdict(inside, verdict, header, n_voters=n_known)

    def agree_inside(self, *, step: int) -> None:
        """Wait until all processes of this member of a crew are here; else none goes on.

        Args:
            step: The step that errors name.

        Raises:
            PeerLostError, StepTimeoutError: One of them is lost, or gave up before.
        """
        header = Header(ChunkKind.VOTE, step, 0, 0, 0, epoch=self._ranks.roster.epoch)
        self.share_verdict(Verdict(Status.OK), header)

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
        # The details do not fit into a header.
        if not self._ranks.is_alone and verdict.status is Status.INPUT:
            refuse_inputs(self._link(), problem, step=step)
        if not self._ranks.is_alone and verdict.status is Status.CONFIG:
            compare(self._link(), lines, step=step)
        raise explain(verdict, params, problem, rank=self._ranks.rank, step=step)

    def _link(self) -> Transport:
        return self._connections.link_all(self._settings.timeouts.step_s)


def compare(link: Transport, lines: Sequence[str], *, step: int) -> None:
    """Compare lines of the form "key: value" between all ranks.

    Raises:
        ConfigMismatchError: On every rank; names the first line that differs, and the ranks.
    """
    _refuse_difference(link, ask_texts(link, "\n".join(lines), step=step), step=step)


def _refuse_difference(link: Transport, texts: Sequence[str], *, step: int) -> None:
    found = find_difference(texts)
    if found is None:
        return
    what, culprits = found
    advice = "give every worker the same parameters, settings, version and calls"
    if what.startswith(_CALL):
        lines = dict.fromkeys(line for text in texts for line in text.split("\n"))
        calls = [line.removeprefix(_CALL) for line in lines if line.startswith(_CALL)]
        advice = f"{' and '.join(calls)} must be called by every rank, after the same step"
    elif what.startswith(_WIRE):
        advice = (
            f"set {WIRE_VARIABLE}=gloo on every worker: only Linux has own sockets, its default"
        )
    raise ConfigMismatchError(
        f"workers disagree: {what}; {advice}", rank=link.rank, step=step, culprits=culprits
    )


def refuse_inputs(link: Transport, problem: str, *, step: int) -> None:
    """Raise StepInputError on every rank if some of them cannot vote.

    Args:
        link: All ranks.
        problem: Reason why this rank cannot vote; "" for none.
        step: The step that errors name.
    """
    culprits, said = find_problem(ask_texts(link, problem, step=step))
    if culprits:
        raise make_error(Status.INPUT, rank=link.rank, step=step, culprits=culprits, problem=said)


def agree_alone(call: str, problem: CheckpointError | None, said: str = "") -> None:
    """Raise if the only process cannot make a call; it can go on afterwards."""
    if problem is not None:
        problem.is_recoverable = True
        raise problem

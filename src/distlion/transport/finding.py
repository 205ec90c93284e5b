"""What the workers of a group agree on when one of them has failed: whom to name, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from distlion.errors import PeerLostError, StepError, StepMismatchError, StepTimeoutError
from distlion.transport.turns import Turn, find_minority, find_out_of_order, name_turns

FailureKind = Literal["lost", "silent", "order", "left"]


@dataclass(frozen=True)
class Finding:
    """What the workers agreed on.

    Attributes:
        kind: "lost", a connection closed; "silent", somebody did not answer in time; "order",
            workers are at calls of different optimizers; "left", somebody said that it leaves.
        culprits: Ranks in the group; empty where that is unknown.
        busy: Whether the culprits do run, but did not come to the exchange.
        note: What else is known, for the message.
    """

    kind: FailureKind
    culprits: tuple[int, ...] = ()
    busy: bool = False
    note: str = ""

    @classmethod
    def parse(cls, found: dict[str, Any]) -> Finding:
        """Read what ``dataclasses.asdict`` makes of one and JSON keeps of that."""
        return cls(found["kind"], tuple(found["culprits"]), found["busy"], found["note"])


class Answer(NamedTuple):
    """What a worker that still runs says of itself.

    Attributes:
        is_waiting: Whether it waits for a transfer of the group.
        turn: Which call of which optimizer it is at.
        alive: The optimizers that it has.
        stray: At which call on another group of the same ranks it waits or has failed; or None.
    """

    is_waiting: bool
    turn: Turn
    alive: Sequence[int]
    stray: str | None


def conclude(
    kind: FailureKind,
    answers: Sequence[Answer | None],
    *,
    optimizer: int | None,
    left: dict[str, Any] | None,
    group: str,
) -> Finding:
    """Draw a finding out of the answers.

    Args:
        kind: What the first worker that failed has seen.
        answers: Of each rank; None where there is none.
        optimizer: The one whose call failed; None where this worker has let go of it.
        left: Who has said that it leaves: its "rank", and "why".
        group: The group's name.
    """
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    present = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    waiting = {rank: answer.turn for rank, answer in present.items() if answer.is_waiting}
    absent = {rank: answer for rank, answer in present.items() if not answer.is_waiting}
    strays = {rank: each.stray for rank, each in absent.items() if each.stray is not None}
    gone = [
        rank
        for rank, answer in absent.items()
        if answer.stray is None and optimizer is not None and optimizer not in answer.alive
    ]
    calls = {rank: f"{turn} of {group}" for rank, turn in waiting.items()} | strays
    out_of_order = find_out_of_order(waiting)
    if left is not None:
        return Finding("left", tuple(sorted({left["rank"], *silent})), note=left["why"])
    if strays and waiting and not silent:
        return Finding("order", tuple(find_minority(calls)), note=name_turns(calls))
    if out_of_order is not None and not silent:
        return Finding("order", tuple(out_of_order), note=name_turns(waiting))
    if gone and not silent:
        note = "it has let go of this optimizer, or destroyed the process group"
        return Finding(kind, tuple(gone), busy=kind == "silent", note=note)
    busy = kind == "silent" and not silent and bool(absent)
    culprits = tuple(absent) if busy else tuple(silent)
    differ = not culprits and len(set(waiting.values())) > 1
    return Finding(kind, culprits, busy=busy, note=name_turns(waiting) if differ else "")


ERRORS: dict[FailureKind, type[StepError]] = {
    "lost": PeerLostError,
    "silent": StepTimeoutError,
    "order": StepMismatchError,
    "left": PeerLostError,
}
"""The error class for each kind of finding."""


def explain(found: Finding, own: int, limits: str) -> str:
    """Describe what the workers agreed on.

    Args:
        found: The finding.
        own: The rank of this worker.
        limits: Which arguments set the limit of a wait.
    """
    if found.kind == "order":
        return (
            f"workers called their optimizers in different orders: {found.note}; every worker must "
            "make the same calls of all its optimizers, in the same order"
        )
    names = ", ".join(f"rank {rank}" for rank in found.culprits) or "a peer"
    if own in found.culprits:
        return "the other workers heard nothing of this one for too long, and gave it up"
    if found.busy:
        text = (
            f"{names} runs, but did not come to the exchange; is it slower than the limit, or has "
            f"it left the training loop? {limits}"
        )
    elif found.kind == "silent":
        text = (
            f"{names} does not answer; is the process stopped, its machine or network down, or "
            f"did it not make this call? {limits}"
        )
    elif found.kind == "left":
        text = f"{names} left, and is waited for no more; look at its log"
    else:
        text = f"{names} is gone; look at its log"
    return f"{text} ({found.note})" if found.note else text

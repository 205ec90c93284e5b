"""What the workers of a group agree on when one of them has failed: whom to name, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distlion.errors import StepError
from distlion.failures import GIVEN_UP, FailureKind, make_error
from distlion.transport.turns import Turn, find_minority, find_out_of_order, name_turns


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


def describe_loss(
    found: Finding, *, rank: int, step: int | None, what: str, limits: str
) -> StepError:
    """Make the error of a transfer that failed.

    Args:
        found: What the workers agreed on.
        rank: This rank.
        step: The step that the error names.
        what: The transfer, and how it ended.
        limits: Which arguments set the limit of a wait.
    """
    is_blamed = found.kind != "order" and rank in found.culprits
    return make_error(
        "busy" if found.busy and not is_blamed else found.kind,
        rank=rank,
        step=step,
        culprits=found.culprits,
        words=GIVEN_UP if is_blamed else None,
        who=", ".join(f"rank {culprit}" for culprit in found.culprits) or "a peer",
        what=what,
        limits=limits,
        calls=found.note,
        note=f" ({found.note})" if found.note else "",
    )

"""The finding of a group's workers after a failure: the ranks to name, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distlion.errors import StepError
from distlion.failures import GIVEN_UP, FailureKind, make_error
from distlion.wire.turns import Turn, find_minority, find_out_of_order, name_turns


@dataclass(frozen=True)
class Finding:
    """The workers' common finding.

    Attributes:
        kind: "lost", a connection closed; "silent", a worker did not answer in time; "order",
            workers are at calls of different optimizers; "call", at different calls of one; "left",
            a worker said that it leaves.
        culprits: Ranks in the group; empty if unknown.
        busy: Whether the culprits run, but did not come to the exchange.
        note: Further details for the message.
    """

    kind: FailureKind
    culprits: tuple[int, ...] = ()
    busy: bool = False
    note: str = ""

    @classmethod
    def parse(cls, found: dict[str, Any]) -> Finding:
        """Read the JSON form of ``dataclasses.asdict`` of a finding."""
        return cls(found["kind"], tuple(found["culprits"]), found["busy"], found["note"])


class Answer(NamedTuple):
    """A running worker's report on itself.

    Attributes:
        waited_s: Seconds that it has waited for a transfer of the group; None if it does not.
        turn: Its present call and optimizer.
        alive: The optimizers that it has.
        stray: The call on another group of the same ranks at which it waits or failed; or None.
    """

    waited_s: float | None
    turn: Turn
    alive: Sequence[int]
    stray: str | None

    @property
    def is_waiting(self) -> bool:
        """True if it waits for a transfer of the group."""
        return self.waited_s is not None

    @classmethod
    def parse(cls, answer: Sequence[Any]) -> Answer:
        """Read the JSON form of an answer."""
        waited_s, turn, alive, stray = answer
        return cls(waited_s, Turn(*turn), alive, stray)


def find_busy(answers: Sequence[Answer], *, optimizer: int | None) -> tuple[int, ...] | None:
    """Find the ranks that run, and have not come to the exchange yet.

    Args:
        answers: The answer of each rank.
        optimizer: The optimizer whose call waits; None for another call.

    Returns:
        These ranks; None if some rank will not come, because it waits elsewhere or has freed the
        optimizer.
    """
    absent = {rank: answer for rank, answer in enumerate(answers) if not answer.is_waiting}
    if any(answer.stray is not None or _is_gone(answer, optimizer) for answer in absent.values()):
        return None
    return tuple(absent)


def _is_gone(answer: Answer, optimizer: int | None) -> bool:
    """Return whether a worker has freed an optimizer, or destroyed the process group."""
    return answer.stray is None and optimizer is not None and optimizer not in answer.alive


def conclude(
    kind: FailureKind,
    answers: Sequence[Answer | None],
    *,
    optimizer: int | None,
    left: dict[str, Any] | None,
    group: str,
) -> Finding:
    """Draw a finding from the answers.

    Args:
        kind: The failure that the first failed worker has seen.
        answers: The answer of each rank; None if it gave none.
        optimizer: The optimizer whose call failed; None if this worker has freed it.
        left: The worker that said that it leaves: its "rank", and "why".
        group: The group's name.
    """
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    present = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    waiting = {rank: answer.turn for rank, answer in present.items() if answer.is_waiting}
    absent = {rank: answer for rank, answer in present.items() if not answer.is_waiting}
    strays = {rank: each.stray for rank, each in absent.items() if each.stray is not None}
    gone = [rank for rank, answer in absent.items() if _is_gone(answer, optimizer)]
    calls = {rank: f"{turn} of {group}" for rank, turn in waiting.items()} | strays
    out_of_order = find_out_of_order(waiting)
    if left is not None:
        return Finding("left", tuple(sorted({left["rank"], *silent})), note=left["why"])
    if strays and waiting and not silent:
        return Finding("order", tuple(find_minority(calls)), note=name_turns(calls))
    if out_of_order is not None and not silent:
        culprits, note = tuple(out_of_order), name_turns(waiting)
        if len({turn.optimizer for turn in waiting.values()}) > 1:
            return Finding("order", culprits, note=note)
        asked = " and ".join(dict.fromkeys(t.call for t in waiting.values() if not t.votes))
        return Finding("call", culprits, note=f"{note}; {asked} must be called by every rank")
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
        found: The workers' common finding.
        rank: This rank.
        step: The step that the error names.
        what: The transfer and its end, in words.
        limits: The arguments that set the limit of a wait, in words.
    """
    is_blamed = found.kind not in ("order", "call") and rank in found.culprits
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

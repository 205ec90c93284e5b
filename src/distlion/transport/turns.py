"""Whose turn it is: the calls of all optimizers of a process group, compared over its store.

Each optimizer has connections of its own, so what two of them send cannot meet. Where one worker
calls optimizer A while the others call B, all wait, since nobody can finish a call that not
everybody has begun. So whoever waits for long posts its turn, and learns whether somebody waits
elsewhere in the same one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

LONG_S = 1.0
"""The wait after which turns are compared; less would ask the store in steps that are only slow."""

NO_OPTIMIZER = -1


class Turn(NamedTuple):
    """A call in which all workers meet.

    Attributes:
        number: How many such calls, of any optimizer of the process group, this worker has begun.
        optimizer: The number of the optimizer: how many had been made on the process group before;
            NO_OPTIMIZER for a call that is of none.
        call: What was called.
    """

    number: int
    optimizer: int
    call: str

    def __str__(self) -> str:
        of = "" if self.optimizer == NO_OPTIMIZER else f" of optimizer {self.optimizer}"
        return f"{self.call}{of}"


class Turns:
    """One worker's turns.

    Args:
        store: Of the process group.

    Attributes:
        n_optimizers: How many optimizers all workers have agreed on.
        alive: The numbers of those that this worker has not let go of.
        now: The last turn that this worker has begun.
        failure: What this worker raised in a turn that ended the group; None before.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._posted: int | None = None
        self.n_optimizers = 0
        self.alive: set[int] = set()
        self.now = Turn(0, 0, "nothing")
        self.failure: str | None = None

    def admit(self, owner: object) -> None:
        """Give the next number to an optimizer, which lives as long as ``owner``."""
        number = self.n_optimizers
        self.n_optimizers += 1
        self.alive.add(number)
        weakref.finalize(owner, self.alive.discard, number).atexit = False

    def differ(self) -> bool:
        """Post this worker's turn; return whether somebody has posted another optimizer for it.

        The first to post a turn leaves what the others compare theirs with. Only optimizers are
        compared: within one, frames tell which call a worker is at.
        """
        own = self.now
        if self._posted == own.number:
            return False
        if self._posted is not None:  # all workers have been there, and may have posted it
            with suppress(RuntimeError):  # some stores cannot
                self._store.delete_key(_key(self._posted))
        self._posted = own.number
        value = str(own.optimizer)
        return bool(self._store.compare_set(_key(own.number), "", value).decode() != value)


def _key(number: int) -> str:
    return f"distlion/turn/{number}"


def find_out_of_order(turns: Mapping[int, Turn]) -> tuple[int, ...] | None:
    """Find ranks whose call is of another optimizer than the same call of most others.

    Args:
        turns: Of the ranks that wait in an exchange.

    Returns:
        Those ranks, none where there is no majority; None where nobody is out of order.
    """
    numbers = Counter(turn.number for turn in turns.values())
    for number in numbers:
        alike = {rank: turn for rank, turn in turns.items() if turn.number == number}
        if len({turn.optimizer for turn in alike.values()}) > 1:
            return find_minority({rank: turn.optimizer for rank, turn in alike.items()})
    return None


def find_minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Find the ranks that differ from more than half of all; none without such a majority."""
    first, count = Counter(values.values()).most_common(1)[0]
    has_majority = 2 * count > len(values)
    return tuple(sorted(rank for rank in values if has_majority and values[rank] != first))


def name_turns(turns: Mapping[int, Turn | str]) -> str:
    """Say who is at which call: "step 3 of optimizer 0 on ranks 0, 2, but ... on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, turn in sorted(turns.items()):
        holders.setdefault(str(turn), []).append(rank)
    return ", but ".join(
        f"{turn} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for turn, ranks in holders.items()
    )

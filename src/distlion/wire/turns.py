"""Turns: the calls of all optimizers of a process group, compared over its store.

Each optimizer has connections of its own, so that messages of two of them cannot meet. If one
worker calls optimizer A while the others call B, all wait, as a call needs all workers. So a worker
that waits for long posts its turn, and learns whether another worker's same turn is elsewhere.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

LONG_S = 1.0
"""Seconds of waiting after which turns are compared; less would burden the store in slow steps."""

NO_OPTIMIZER = -1


class Turn(NamedTuple):
    """A call in which all workers meet.

    Attributes:
        number: Number of such calls, of any optimizer of the process group, that this worker has
            begun.
        optimizer: The number of the optimizer, in the order in which they were made on the process
            group; NO_OPTIMIZER for another call.
        call: Name of the call.
        votes: Whether it begins with votes; all other calls begin with a question, on other
            connections.
    """

    number: int
    optimizer: int
    call: str
    votes: bool = False

    @property
    def place(self) -> str:
        """The connections on which it begins."""
        return f"{self.optimizer} {'votes' if self.votes else 'asks'}"

    def __str__(self) -> str:
        of = "" if self.optimizer == NO_OPTIMIZER else f" of optimizer {self.optimizer}"
        return f"{self.call}{of}"


class Turns:
    """One worker's turns.

    Args:
        store: The process group's store.

    Attributes:
        n_optimizers: Number of optimizers that all workers have agreed on.
        alive: The numbers of the optimizers that this worker has not freed.
        now: The last turn that this worker has begun.
        failure: This worker's error in a turn that ended the group; None before.
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
        """Post this worker's turn; return whether another worker posted another place for it.

        The others compare their turn with the first one posted. Only places are compared, as frames
        and questions show a worker's call at one.
        """
        own = self.now
        if self._posted == own.number:
            return False
        if self._posted is not None:  # all workers have passed it, and may have posted it
            with suppress(RuntimeError):  # some stores cannot
                self._store.delete_key(_key(self._posted))
        self._posted = own.number
        value = own.place
        return bool(self._store.compare_set(_key(own.number), "", value).decode() != value)


def _key(number: int) -> str:
    return f"distlion/turn/{number}"


def find_out_of_order(turns: Mapping[int, Turn]) -> tuple[int, ...] | None:
    """Find ranks whose call begins at another place than most others' same call.

    Args:
        turns: Turns of the ranks that wait in an exchange.

    Returns:
        These ranks, none if there is no majority; None if nobody is out of order.
    """
    numbers = Counter(turn.number for turn in turns.values())
    for number in numbers:
        alike = {rank: turn for rank, turn in turns.items() if turn.number == number}
        if len({turn.place for turn in alike.values()}) > 1:
            return find_minority({rank: turn.place for rank, turn in alike.items()})
    return None


def find_minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Find the ranks whose value differs from the majority's; none without a majority."""
    first, count = Counter(values.values()).most_common(1)[0]
    has_majority = 2 * count > len(values)
    return tuple(sorted(rank for rank in values if has_majority and values[rank] != first))


def name_turns(turns: Mapping[int, Turn | str]) -> str:
    """Describe the ranks' calls: "step 3 of optimizer 0 on ranks 0, 2, but ... on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, turn in sorted(turns.items()):
        holders.setdefault(str(turn), []).append(rank)
    return ", but ".join(
        f"{turn} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for turn, ranks in holders.items()
    )

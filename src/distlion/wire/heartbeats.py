"""Heartbeats: each member shows that it runs; one that waits finds those that have fallen silent.

They go through the store of the group, not from member to member. The store outlives all members,
each has a connection to it already, and all see the same heartbeats. A member writes one key. One
that waits reads those of a few others, so that the load of the store grows with the members only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

BEAT_S = 0.2
"""Seconds between two heartbeats of a member."""
N_HEARD = 8
"""Members that one listens to: the next ones in the order of ranks. If several are silent, one
that runs precedes each row of them; it raises the alarm, which finds all others."""
_LONGEST_LOOK_S = 2 * BEAT_S
RETURN_S = 10.0
"""Seconds in which all come back to a store that was away: attempts to connect may take some."""


def beat(store: Any, rank: int, number: int) -> None:
    """Show that a member runs.

    Args:
        store: The store of its group alone, so that no heartbeat of an earlier one counts.
        rank: The member.
        number: Number that it has not shown before.
    """
    store.set(_name(rank), str(number))


class Heartbeats:
    """The heartbeats of a group, as one of its members hears them.

    Args:
        store: The store of the group.
        rank: This member.
        world_size: Number of members.
        silence_s: Seconds without a heartbeat after which a member is silent.

    Attributes:
        silence_s: The argument.

    Notes:
        Silence counts for nothing while the store is away, and for ``RETURN_S`` after that. A
        member may find the next store much later than this one, and trains meanwhile: its silence
        counts from its first heartbeat there.

        Seconds between two looks count for little where they are many: then this worker was held up
        itself, and so may have been the others, and what they wrote may still be under way.
    """

    def __init__(self, store: Any, rank: int, world_size: int, silence_s: float) -> None:
        self._store, self.silence_s = store, silence_s
        n_heard = min(N_HEARD, world_size - 1)
        self._next = [(rank + place) % world_size for place in range(1, n_heard + 1)]
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._looked_s = time.monotonic()
        self._grace_s = self._absence_s = 0.0
        self._returned: set[int] = set()

    def begin_anew(self, absence_s: float = math.inf) -> None:
        """Note that the store was away: others may come back to it later than this member.

        Args:
            absence_s: Seconds after which those that have not come back are silent too.
        """
        self._heard, self._grace_s, self._absence_s = {}, RETURN_S, absence_s
        self._returned.clear()

    def find_silent(self, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Look at the heartbeats; return the members that have been silent for too long.

        Args:
            ranks: The members to listen to; None for the next ones.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        before, self._heard = self._heard, {}
        for rank in self._next if ranks is None else ranks:
            word = self._read(rank)
            last, silent_s = before.get(rank, (None, 0.0))
            self._heard[rank] = word, silent_s + passed_s if word == last else 0.0
            if last not in (None, word):
                self._returned.add(rank)
        self._grace_s = max(0.0, self._grace_s - passed_s)
        self._absence_s = max(0.0, self._absence_s - passed_s)
        if self._grace_s:
            return ()
        silent = {rank for rank, (_, for_s) in self._heard.items() if for_s >= self.silence_s}
        return tuple(sorted(silent & self._returned if self._absence_s else silent))

    def _read(self, rank: int) -> bytes:
        """Return a member's last heartbeat, empty before the first."""
        name = _name(rank)
        found: bytes = self._store.get(name) if self._store.check([name]) else b""
        return found


def _name(rank: int) -> str:
    return f"distlion/beat/{rank}"

"""The memory of a member: its run, which it restores in a store that has come back empty.

Each member that comes back does, over its new connection and before anything else:

    1 set       a sign that a worker is alive which has trained
    2 raise     the numbers of workers and epochs, beyond all that were given
    3 raise     the number of the last epoch that has begun
    4 set       the crew's token, unless there is one

All four may be done by several members at once, and again: counters only rise, and the first token
counts. A member that dies on the way leaves numbers that are too high, and nothing else. The token
comes last, so that whoever finds it can rely on the numbers. The sign comes first, so that
newcomers which find the rest wait for the next sign, and begin nothing under this token. Another
token is that of workers who came to the empty store before any member, and have begun a new run in
it: a member then ends with CrewError, and the two runs never meet. Newcomers restore nothing. They
wait for members.

Whether the run is over is not restored: then nobody is left to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distlion.errors import CrewError

if TYPE_CHECKING:
    from distlion.crew.signed import SignedStore

IDS, EPOCHS, CREW, BEGUN, NOW = "ids", "epochs", "crew", "begun", "now"
"""Keys: counters of workers' numbers and of epochs' numbers that were given, the token, the last
epoch that has begun, and a line about the present members."""
ALIVE = "alive"
"""Key of the latest sign of a worker that has trained."""
GAP = 100
"""Numbers left out, as others may have been given some that this member has not heard of."""


@dataclass
class Memory:
    """One worker's knowledge of its run.

    Attributes:
        crew: The token of its crew, drawn when the first epoch was formed; "" before.
        n_ids, n_epochs: Numbers of workers and of epochs that were given, as far as it knows.
        begun: The last epoch that has begun, or was claimed to be a run's first one.
        claimed: The epochs that this worker has claimed so.
        now: A line about the members of this worker's epoch; "" before it is a member.
    """

    crew: str = ""
    n_ids: int = 0
    n_epochs: int = 0
    begun: int = 0
    claimed: set[int] = field(default_factory=set)
    now: str = ""

    def note_decision(self, decision: Mapping[str, Any]) -> None:
        """Note an epoch that this worker is in."""
        self.crew = decision["crew"]
        self.note_ids(record["id"] for record in decision["members"])
        self.n_epochs = max(self.n_epochs, decision["epoch"])

    def note_ids(self, ids: Iterable[int]) -> None:
        """Note numbers of workers."""
        self.n_ids = max(self.n_ids, *(identity + 1 for identity in ids), 0)

    def note_begun(self, number: int) -> None:
        """Note that an epoch has begun."""
        self.begun, self.n_epochs = max(self.begun, number), max(self.n_epochs, number)

    def restore(self, store: SignedStore) -> None:
        """Restore what the run needs, if this worker is a member.

        Args:
            store: The run's part of the store.

        Raises:
            CrewError: It has another crew, or a value that was not signed with the run's secret.
        """
        if not self._may_restore:
            return
        found = store.get(CREW) if store.check([CREW]) else ""
        self._check(found or self.crew)
        gap = 0 if found else GAP
        # 1 the sign; the next ones come from the lookout
        if self.now:
            store.set(ALIVE, "back")
        # 2 the numbers that were given
        raise_to(store, IDS, self.n_ids + gap, self.n_ids + GAP)
        raise_to(store, EPOCHS, self.n_epochs + gap, self.n_epochs + GAP)
        # 3 the last epoch that has begun
        raise_begun(store, self.begun)
        # 4 the token
        if not found:
            self._check(store.compare_set(CREW, "", self.crew))
            if self.now:
                store.plain.set(NOW, self.now)

    @property
    def _may_restore(self) -> bool:
        """True for a member, and before the first epoch for whoever was to be in it."""
        has_begun = self.begun and self.begun not in self.claimed
        return bool(self.now or (self.crew and not has_begun))

    def _check(self, found: str) -> None:
        if found != self.crew:
            raise CrewError(
                "the store was started again empty, and other workers have begun another run in it "
                "before the members of this one came back; this one cannot go on there. Stop "
                "those workers, start the store again with --members-first, and resume all workers "
                "from a checkpoint"
            )


def raise_to(store: SignedStore, name: str, least: int, number: int) -> None:
    """Raise a counter to a number, unless it has come to the least one already."""
    while (found := store.add(name, 0)) < least:
        store.plain.compare_set(name, str(found), str(number))


def read_begun(store: SignedStore) -> int:
    """Return the last epoch that has begun, or was claimed to be the first one; 0 before."""
    return store.read(BEGUN, int) if store.check([BEGUN]) else 0


def raise_begun(store: SignedStore, number: int) -> None:
    """Note that an epoch has begun, unless a later one has."""
    while (found := read_begun(store)) < number:
        store.compare_set(BEGUN, str(found) if found else "", str(number))

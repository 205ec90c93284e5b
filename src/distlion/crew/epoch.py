"""Epochs: the members between two changes, and the process group made for them.

The members are ordered alike on all of them, the most advanced first.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew.memory import IDS
from distlion.crew.signed import SignedStore
from distlion.errors import CrewError
from distlion.votes.roster import Roster
from distlion.wire.groups import drop_store, keep, keep_store
from distlion.wire.heartbeats import Heartbeats
from distlion.wire.watch import watch_peers

STRANGER = (
    "the crew trains with other settings, other parameters or another version of distlion than "
    "this worker; start it with the same script as the others, and with DISTLION_WIRE=gloo on all "
    "if one of them does not run on Linux"
)


@dataclass(frozen=True)
class Member:
    """A worker of a crew.

    Attributes:
        id: Its unique number.
        epoch: The last epoch that it completed; 0 for a newcomer.
        step: Number of steps in its parameters.
        calls: Number of its local steps; 0 where every step is a vote.
        settings: Digest of its parameters' kinds and of its settings.
        host: Its host, for logs.
        pid: Its process number there.
        processes: Number of its processes, its lanes.
        has_group: Whether they have a group of their own, also a single one. Then the crew's group
            is apart from torch's, and cannot connect to a member without.
        donor: The member whose parameters and replies it has, as a newcomer, or after the others
            have trained on without it; None for none.
        follows: In an epoch, the donor's progress, if it is among the most advanced; else empty.
    """

    id: int
    epoch: int
    step: int
    settings: int
    host: str
    pid: int
    calls: int = 0
    processes: int = 1
    has_group: bool = False
    donor: int | None = None
    follows: tuple[int, ...] = ()

    @property
    def progress(self) -> tuple[int, ...]:
        """Its progress, for comparison: a later epoch wins, whatever the step."""
        return self.follows or (self.epoch, self.step, self.calls)

    @property
    def kind(self) -> tuple[int, bool]:
        """Its traits that must be equal on all members, so that they can connect."""
        return self.processes, self.has_group

    def describe(self) -> dict[str, Any]:
        """Return it in the form that the store keeps, without what an epoch adds."""
        described = asdict(self)
        del described["follows"]
        return described

    def __str__(self) -> str:
        return f"worker {self.id} ({self.host}, process {self.pid})"


logger = logging.getLogger("distlion")

QUICK_S = 1.5
"""Seconds that the members of an epoch wait for each other once they know that it has ended."""
CONNECT_S, CONNECT_S_EACH = 2.5, 0.5
"""Seconds for connections, and more for each member. All are ready at the start, so a longer wait
is for a member that has died meanwhile."""
_POLL_S = 0.005
_MISSING = "missing"


class FormingError(Exception):
    """A worker was lost while an epoch was formed."""


class TooFewError(FormingError):
    """Too few workers came in time."""


class MissingError(FormingError):
    """Some members did not come to form an epoch.

    Args:
        culprits: Their ranks.
    """

    def __init__(self, culprits: Sequence[int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, culprits))} did not come")
        self.culprits = tuple(culprits)


@dataclass(frozen=True)
class Epoch:
    """Members between two changes of membership.

    Attributes:
        number: Its number, greater than all earlier ones.
        members: The members in the order of their ranks, the most advanced first.
        place: This worker's place among them, its rank where each member is one process.
        store: This epoch's own part of the store.
        guests: Places of the members that asked the others to be let in.
        lane: The number of this process in its member.
    """

    number: int
    members: tuple[Member, ...]
    place: int
    store: SignedStore
    guests: tuple[int, ...] = ()
    lane: int = 0

    @property
    def n_lanes(self) -> int:
        """Number of processes of each member."""
        return self.members[0].processes

    @property
    def rank(self) -> int:
        """This process's rank among all processes; those of a member follow each other."""
        return self.place * self.n_lanes + self.lane

    @property
    def names(self) -> list[str]:
        """The names of all processes by rank: the member's id, and its lane if it has several."""
        if self.n_lanes == 1:
            return [str(member.id) for member in self.members]
        return [f"{each.id}.{lane}" for each in self.members for lane in range(self.n_lanes)]

    def find_places(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Find the places of the members that have processes of these ranks."""
        return tuple(sorted({rank // self.n_lanes for rank in ranks}))

    @property
    def lane_store(self) -> SignedStore:
        """The part of the epoch's store for the processes of this lane."""
        return self.store if self.n_lanes == 1 else self.store.at(f"lane {self.lane}")

    @property
    def roster(self) -> Roster:
        """The voters: each counts a shard, and has one vote."""
        ids = tuple(member.id for member in self.members)
        return Roster(ids, ids, (1,) * len(ids), self.number)

    def describe(self) -> str:
        """Describe the members in one line."""
        names = ", ".join(map(str, self.members))
        where, size = f"epoch {self.number} at step {self.members[0].step}", len(self.members)
        each = f" of {self.n_lanes} processes" if self.n_lanes > 1 else ""
        return f"{where}, {size} workers{each}: {names}"

    @property
    def has_newcomers(self) -> bool:
        """True if some member is a newcomer without state."""
        return any(member.epoch == 0 for member in self.members)

    def find_misfits(self, culprits: Collection[int]) -> tuple[int, ...]:
        """Find the ranks to blame where members differ: only ones that join others that train.

        Args:
            culprits: Ranks that differ from the majority, which may be of newcomers.

        Returns:
            The ranks without which the others go on; none where nobody has trained before.
        """
        new = {rank for rank, each in enumerate(self.members) if each.epoch == 0}
        joining = new | set(self.guests) if self.members[0].epoch else set()
        return tuple(sorted(joining & set(culprits) or joining))

    @property
    def has_laggards(self) -> bool:
        """True if some member has other parameters than the first one."""
        return len({member.progress for member in self.members}) > 1

    @property
    def followers(self) -> tuple[int, ...]:
        """Ranks of workers that have caught up with a donor, and so have its parameters."""
        return tuple(rank for rank, each in enumerate(self.members) if each.follows)

    def find_misled(self, culprits: Collection[int]) -> tuple[int, ...]:
        """Find the followers to blame where parameters differ: all, or none.

        Args:
            culprits: Ranks that differ from the majority, which may be of followers.
        """
        differing, followers = set(culprits), set(self.followers)
        have_trained = set(range(len(self.members))) - followers
        is_theirs = differing <= followers or have_trained <= differing
        return self.followers if is_theirs else ()

    @property
    def is_follower(self) -> bool:
        """True if this worker is a follower."""
        return self.place in self.followers

    @property
    def takes_state(self) -> bool:
        """True if this worker takes what is not in parameters from the first one."""
        return self.is_behind or self.is_follower

    @property
    def gives_state(self) -> bool:
        """True if some member takes it."""
        return self.has_laggards or bool(self.followers)

    @property
    def most_advanced(self) -> list[int]:
        """Ranks that must have the first one's parameters; none before some have trained."""
        first = self.members[0]
        alike = [rank for rank, each in enumerate(self.members) if each.progress == first.progress]
        return alike if first.epoch else []

    @property
    def connect_timeout_s(self) -> float:
        """Seconds for each process group of the members."""
        return CONNECT_S + CONNECT_S_EACH * len(self.members) * self.n_lanes

    @property
    def is_behind(self) -> bool:
        """True if this worker's parameters are older than the first one's."""
        return self.members[self.place].progress != self.members[0].progress

    @property
    def takes_parameters(self) -> bool:
        """True if this worker takes the first one's: its own are older, or nobody trained yet."""
        return self.is_behind or (self.rank > 0 and not self.members[0].epoch)


def take_id(store: SignedStore) -> int:
    """Return a number that is unique in the run."""
    return store.add(IDS, 1) - 1


def order_members(members: Sequence[Member]) -> list[Member]:
    """Order the members of an epoch, the most advanced first, and note who follows one of them."""
    by_id = {member.id: member for member in members}
    best = max(member.progress for member in members)
    settled = []
    for member in members:
        donor = None if member.donor is None else by_id.get(member.donor)
        follows = donor is not None and donor.epoch > 0 and donor.progress == best
        settled.append(replace(member, follows=best if follows else ()))
    return sorted(
        settled,
        key=lambda each: (*(-number for number in each.progress), bool(each.follows), each.id),
    )


def decline(epoch: Epoch) -> None:
    """Let the others form an epoch without this worker."""
    own = epoch.names[epoch.rank]
    with suppress(DistError, CrewError):  # a store that is gone is noticed where it is needed
        epoch.store.compare_set(_MISSING, "", json.dumps([own]))


def call_roll(epoch: Epoch) -> None:
    """Wait until all members have come to form an epoch; all find the same ones missing, or none.

    Raises:
        MissingError: Some did not come in time, as found by the first member that timed out.
    """
    store, names = epoch.store, epoch.names
    store.set(f"here/{names[epoch.rank]}", "")
    keys, until_s = [f"here/{each}" for each in names], time.monotonic() + QUICK_S
    while not store.check(keys) and not store.check([_MISSING]) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    missing = [each for each in names if not store.check([f"here/{each}"])]
    found = json.loads(store.compare_set(_MISSING, "", json.dumps(missing)))
    if found:
        raise MissingError([names.index(each) for each in found])


def listen(epoch: Epoch, *, silence_s: float) -> Heartbeats:
    """Return the heartbeats of an epoch's members, as this one hears them.

    Args:
        epoch: The epoch.
        silence_s: Seconds without a heartbeat after which a member is silent.
    """
    return Heartbeats(epoch.store.plain, epoch.rank, len(epoch.names), silence_s)


def connect(epoch: Epoch, *, timeout_s: float, silence_s: float) -> dist.ProcessGroup:
    """Make the default process group of an epoch.

    Args:
        epoch: The epoch; all its members must call this.
        timeout_s: Limit of an operation on the group.
        silence_s: Seconds without a heartbeat after which a member is given up.

    Raises:
        FormingError: A member did not come to make it.
    """
    store = PrefixStore("group", epoch.store.plain)
    try:
        with _same_excepthook():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=epoch.place,
                world_size=len(epoch.members),
                timeout=timedelta(seconds=epoch.connect_timeout_s),
            )
    except RuntimeError as error:
        _forget_group()
        raise FormingError(str(error)) from error
    group = dist.group.WORLD
    assert group is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    keep_store(group, store)
    watch_peers(group, store_is_apart=True, heartbeats=listen(epoch, silence_s=silence_s))
    return group


def _forget_group() -> None:
    """Let torch number groups from 0 again.

    torch also counts groups that failed, and its keys in the store depend on the number: a worker
    with a failure would never meet one without.
    """
    alone = dist.HashStore()  # type: ignore[attr-defined]
    with _same_excepthook():
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    dist.destroy_process_group()


@contextmanager
def _same_excepthook() -> Iterator[None]:
    """Restore the exception hook, which torch wraps for each new group."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


def disconnect(*, has_failed: bool) -> None:
    """Give up the default process group."""
    group = dist.group.WORLD
    if group is None:
        return
    drop_store(group)
    if has_failed:
        # Its destructor may wait for peers that are silent.
        keep(group)
    del group
    dist.destroy_process_group()

"""Epochs: a roster of workers, decided once for all of them, and the process group made for it.

    all ask ──► epoch 1 ──one is lost──► epoch 2 ──one asks──► epoch 3 ──too few──► all ask

The members of an epoch are ordered alike on all of them: the most advanced first. If one is lost,
the others have agreed on which (``PeerWatch``). If one asks to be let in, all have left the epoch
at the same step. So the remaining members decide on the next epoch among themselves, in
milliseconds, and again if it could not be formed. If they are too few, they ask, as workers from
outside do. Where nobody trains, the workers that ask decide.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew.admission import Ask, answer, list_ready
from distlion.crew.member import Member
from distlion.crew.rendezvous import FormingError, MissingError, Rendezvous
from distlion.crew.store import SignedStore
from distlion.errors import CrewError
from distlion.votes.roster import Roster
from distlion.wire.groups import drop_store, keep, keep_store
from distlion.wire.watch import watch_peers

logger = logging.getLogger("distlion")

QUICK_S = 1.5
"""Seconds that the members of an epoch wait for each other once they know that it has ended."""
CONNECT_S, CONNECT_S_EACH = 2.5, 0.5
"""Seconds for connections, and more for each member. All are ready at the start, so a longer wait
is for a member that has died meanwhile."""
_POLL_S = 0.005
_EPOCHS, _IDS, _DECISION, _MISSING = "epochs", "ids", "decision", "missing"


@dataclass(frozen=True)
class Epoch:
    """Members between two changes of membership.

    Attributes:
        number: Its number, greater than all earlier ones.
        members: The members in the order of their ranks, the most advanced first.
        place: This worker's rank.
        store: This epoch's own part of the store.
        guests: Ranks of the members that asked the others to be let in.
    """

    number: int
    members: tuple[Member, ...]
    place: int
    store: SignedStore
    guests: tuple[int, ...] = ()

    @property
    def roster(self) -> Roster:
        """The voters: each counts a shard, and has one vote."""
        ids = tuple(member.id for member in self.members)
        return Roster(ids, ids, (1,) * len(ids), self.number)

    def describe(self) -> str:
        """Describe the members in one line."""
        names = ", ".join(map(str, self.members))
        where, size = f"epoch {self.number} at step {self.members[0].step}", len(self.members)
        return f"{where}, {size} workers: {names}"

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
    def most_advanced(self) -> list[int]:
        """Ranks that must have the first one's parameters; none before some have trained."""
        first = self.members[0]
        alike = [rank for rank, each in enumerate(self.members) if each.progress == first.progress]
        return alike if first.epoch else []

    @property
    def connect_timeout_s(self) -> float:
        """Seconds for each process group of the members."""
        return CONNECT_S + CONNECT_S_EACH * len(self.members)

    @property
    def is_behind(self) -> bool:
        """True if this worker's parameters are older than the first one's."""
        return self.members[self.place].progress != self.members[0].progress

    @property
    def takes_parameters(self) -> bool:
        """True if this worker takes the first one's: its own are older, or nobody trained yet."""
        return self.is_behind or (self.place > 0 and not self.members[0].epoch)


def take_id(store: SignedStore) -> int:
    """Return a number that is unique in the run."""
    return store.add(_IDS, 1) - 1


def decide_among(rendezvous: Rendezvous, asks: Sequence[Ask], *, min_workers: int) -> None:
    """Decide on an epoch of workers that ask, where nobody trains, and answer them.

    The most advanced worker's parameters and settings count. Before the first epoch all are taken,
    and the handshake reports differences. Newcomers alone do not begin while others that have
    trained live.

    Args:
        rendezvous: The rendezvous.
        asks: The workers that are there.
        min_workers: Fewest workers that train.
    """
    first = max((each.member for each in asks), key=lambda member: member.progress)
    if not first.epoch and rendezvous.find_last_begun() and rendezvous.is_somebody_alive():
        return
    alike = [each for each in asks if not first.epoch or each.member.settings == first.settings]
    answer(rendezvous.store, [each for each in asks if each not in alike], {})
    if len(alike) >= min_workers:
        advanced = sorted(alike, key=lambda each: each.member.progress, reverse=True)
        chosen = advanced[: rendezvous.count_places(0)]
        members = [each.member.describe() for each in chosen]
        answer(rendezvous.store, chosen, _make_decision(rendezvous, members, []))


def _make_decision(
    rendezvous: Rendezvous, members: list[dict[str, Any]], guests: list[int]
) -> dict[str, Any]:
    return {"epoch": rendezvous.store.add(_EPOCHS, 1), "members": members, "guests": guests}


def follow(
    rendezvous: Rendezvous,
    before: Epoch,
    own: Member,
    lost: Collection[int],
    *,
    min_workers: int,
    until_s: float,
) -> Epoch | None:
    """Form the next epoch from the remaining members and the workers that ask to join.

    The first worker to see all members decides. After a timeout the first one decides with those
    present. Each epoch has only one successor, whoever decides. A member that comes too late asks
    to be let in, which costs the others little.

    Args:
        rendezvous: The rendezvous; its store keeps the decision.
        before: The epoch that is over, or could not be formed.
        own: This worker, as it is now.
        lost: Ids of workers known to be lost.
        min_workers: Fewest workers that train.
        until_s: End of the wait, by the monotonic clock.

    Returns:
        The epoch; None if too few are there, or others have decided without this worker.
    """
    left = [member.id for member in before.members if member.id not in lost]
    if own.id not in left or len(left) < min_workers:
        return None
    store, keys = before.store, [f"next/{each}" for each in left]
    try:
        store.set(f"next/{own.id}", json.dumps(own.describe()))
        while not store.check(keys) and not store.check([_DECISION]):
            if time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        there = [key for key in keys if store.check([key])]
        if not store.check([_DECISION]) and len(there) >= min_workers:
            _decide(rendezvous, before, [store.read(key, json.loads) for key in there])
        if not store.check([_DECISION]):
            store.delete_key(f"next/{own.id}")  # later ones must not count on this worker
            if not store.check([_DECISION]):
                return None
        decision = store.read(_DECISION, json.loads)
    except CrewError:
        raise
    except RuntimeError:
        return None
    return read_decision(rendezvous, decision, own)


def _decide(rendezvous: Rendezvous, before: Epoch, records: list[dict[str, Any]]) -> None:
    """Decide on the next epoch, unless it is decided; tell the workers that asked that they are in.

    Args:
        rendezvous: The rendezvous; its store holds the asks.
        before: The epoch that is over.
        records: The record of each worker that is there.
    """
    settings = before.members[before.place].settings
    asks = list_ready(rendezvous.store, settings)[: rendezvous.count_places(len(records))]
    members = [*records, *(each.member.describe() for each in asks)]
    guests = [each.member.id for each in asks]
    decision = _make_decision(rendezvous, members, guests)
    proposal = json.dumps(decision)
    if before.store.compare_set(_DECISION, "", proposal) == proposal:
        answer(rendezvous.store, asks, decision)


def call_roll(epoch: Epoch) -> None:
    """Wait until all members have come to form an epoch; all find the same ones missing, or none.

    Raises:
        MissingError: Some did not come in time, as found by the first member that timed out.
    """
    store, ids = epoch.store, [member.id for member in epoch.members]
    store.set(f"here/{ids[epoch.place]}", "")
    keys, until_s = [f"here/{each}" for each in ids], time.monotonic() + QUICK_S
    while not store.check(keys) and not store.check([_MISSING]) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    missing = [each for each in ids if not store.check([f"here/{each}"])]
    found = json.loads(store.compare_set(_MISSING, "", json.dumps(missing)))
    if found:
        raise MissingError([ids.index(each) for each in found])


def read_decision(rendezvous: Rendezvous, decision: Mapping[str, Any], own: Member) -> Epoch | None:
    """Make the epoch of a decision; return None if this worker is not in it."""
    found = [Member(**record) for record in decision["members"]]
    members = sorted(found, key=lambda member: (*[-each for each in member.progress], member.id))
    ids = [member.id for member in members]
    if own.id not in ids:
        return None
    number, guests = decision["epoch"], decision["guests"]
    ranks = tuple(rank for rank, each in enumerate(ids) if each in guests)
    store = rendezvous.store.at(f"epoch {number}")
    return Epoch(number, tuple(members), ids.index(own.id), store, ranks)


def connect(epoch: Epoch, *, timeout_s: float) -> dist.ProcessGroup:
    """Make the default process group of an epoch.

    Args:
        epoch: The epoch; all its members must call this.
        timeout_s: Limit of an operation on the group.

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
    watch_peers(group, store_is_apart=True)
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

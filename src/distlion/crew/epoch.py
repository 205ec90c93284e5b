"""Epochs: a roster of workers, decided once for all of them, and the process group made for it.

    round ──members──► epoch 1 ──one is lost──► epoch 2 ──one asks──► epoch 3 ──too few──► round

The workers of a round of the rendezvous tell each other what they have, and are ordered alike: the
most advanced first. Where one of them is lost, the others have agreed on whom (``PeerWatch``), and
where one asks to be let in, all have left the epoch at the same step. So those who are left decide
on the next epoch among themselves, in milliseconds, and once more where it could not be formed.
Too few of them go back to the rendezvous, which takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew.admission import answer, list_ready
from distlion.crew.member import STRANGER, Member
from distlion.crew.rendezvous import FormingError, MissingError, OthersTrainError, Rendezvous
from distlion.errors import CrewError
from distlion.transport import drop_store, keep, keep_store, watch_peers
from distlion.vote import Roster

QUICK_S = 1.5
"""How long the members of an epoch wait for each other once they know that it has ended."""
FACTS_S = 10.0
"""How long the workers of a round wait for what each of them has."""
CONNECT_S, CONNECT_S_EACH = 2.5, 0.5
"""How long connections may take, and for each member more: one that has died meanwhile is waited
for. All are ready when it begins."""
_POLL_S = 0.005
_EPOCHS, _IDS, _DECISION, _MISSING = "epochs", "ids", "decision", "missing"


@dataclass(frozen=True)
class Epoch:
    """Members between two changes of membership.

    Attributes:
        number: Greater than that of every epoch before.
        members: In the order of their ranks, the most advanced first.
        place: This worker's rank.
        store: A part of the store that this epoch has for itself.
        guests: Ranks of those who have asked the others to be let in.
    """

    number: int
    members: tuple[Member, ...]
    place: int
    store: Any
    guests: tuple[int, ...] = ()

    @property
    def roster(self) -> Roster:
        """The voters: each counts a shard, and has one vote."""
        ids = tuple(member.id for member in self.members)
        return Roster(ids, ids, (1,) * len(ids), self.number)

    def describe(self) -> str:
        """Say in a line who is there."""
        names = ", ".join(map(str, self.members))
        where, size = f"epoch {self.number} at step {self.members[0].step}", len(self.members)
        return f"{where}, {size} workers: {names}"

    @property
    def has_newcomers(self) -> bool:
        """True if some member brings nothing."""
        return any(member.epoch == 0 for member in self.members)

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
        """True if this worker has other parameters than the first one."""
        return self.members[self.place].progress != self.members[0].progress

    @property
    def takes_parameters(self) -> bool:
        """True if this worker gets the first one's: it is behind, or nobody has trained yet."""
        return self.is_behind or (self.place > 0 and not self.members[0].epoch)


def take_id(store: Any) -> int:
    """Return a number that no other worker of the run gets."""
    return int(store.add(_IDS, 1)) - 1


def meet(
    rendezvous: Rendezvous, own: Member, *, min_workers: int, limit_s: float, last: int
) -> Epoch:
    """Form an epoch of all who come to the next round of the rendezvous.

    Args:
        rendezvous: Where workers meet.
        own: This worker.
        min_workers: The least that train.
        limit_s: How long to wait for them.
        last: The number of the last epoch that had begun, as this worker knows.

    Raises:
        TooFewError: They did not come in time, or others train.
        FormingError: Somebody who came is gone again, or cannot take part.
        CrewError: As ``Rendezvous.join``; or the others train with other settings than this worker.
    """
    found = rendezvous.join(limit_s, last)
    try:
        found.store.set(f"member/{found.place}", json.dumps(asdict(own)))
        keys = [f"member/{place}" for place in range(found.size)]
        _await(found.store, keys, FACTS_S)
        members = [Member(**json.loads(found.store.get(key))) for key in keys]
        if found.place == 0:
            number = 0 if _are_outside(rendezvous, members) else rendezvous.store.add(_EPOCHS, 1)
            found.store.set("epoch", str(number))
        _await(found.store, ["epoch"], FACTS_S)
        number = int(found.store.get("epoch"))
    except RuntimeError as error:
        raise FormingError(str(error)) from error
    if not number:
        raise OthersTrainError("others train, and have not let in those who met")
    members = leave_out_strangers(members, own)
    if len(members) < min_workers:
        raise FormingError("too few are left who train with the same settings")
    return _make(rendezvous.store, number, members, own)


def _are_outside(rendezvous: Rendezvous, members: Collection[Member]) -> bool:
    """Return whether all are new while others live that have trained: they must not begin anew."""
    are_new = all(member.epoch == 0 for member in members)
    return are_new and rendezvous.find_last_begun() > 0 and rendezvous.is_somebody_alive()


def leave_out_strangers(members: list[Member], own: Member) -> list[Member]:
    """Exclude workers whose parameters or settings differ from those that train.

    Before the first epoch all are kept, and the handshake says what differs.

    Raises:
        CrewError: This worker is left out.
    """
    first = max(members, key=lambda member: member.progress)
    alike = [member for member in members if member.settings == first.settings]
    if first.epoch == 0:
        return members
    if own not in alike:
        raise CrewError(STRANGER)
    return alike


def follow(
    rendezvous: Rendezvous,
    before: Epoch,
    own: Member,
    lost: Collection[int],
    *,
    min_workers: int,
    until_s: float,
) -> Epoch | None:
    """Form the epoch after another one: of its members that are left, and of those who ask.

    The first worker to see all members decides. After a timeout the first one decides with those
    present. Each epoch has one that follows it, whoever decides. A member that comes too late
    asks to be let in, which costs the others little.

    Args:
        rendezvous: Its store keeps the decision.
        before: The epoch that is over, or could not be formed.
        own: This worker, as it is now.
        lost: Ids of those who are known to be lost.
        min_workers: The least that train.
        until_s: When to stop waiting, by the monotonic clock.

    Returns:
        The epoch; None where too few are there, or others have decided without this worker.
    """
    left = [member.id for member in before.members if member.id not in lost]
    if own.id not in left or len(left) < min_workers:
        return None
    store, keys = before.store, [f"next/{each}" for each in left]
    try:
        store.set(f"next/{own.id}", json.dumps(asdict(own)))
        while not store.check(keys) and not store.check([_DECISION]):
            if time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        there = [key for key in keys if store.check([key])]
        if not store.check([_DECISION]) and len(there) >= min_workers:
            _decide(rendezvous, before, [json.loads(store.get(key)) for key in there])
        if not store.check([_DECISION]):
            store.delete_key(f"next/{own.id}")  # others that come later shall not count on it
            if not store.check([_DECISION]):
                return None
        decision = json.loads(store.get(_DECISION))
    except RuntimeError:
        return None
    return read_decision(rendezvous, decision, own)


def _decide(rendezvous: Rendezvous, before: Epoch, records: list[dict[str, Any]]) -> None:
    """Decide on the next epoch, unless somebody has; tell those who have asked that they are in.

    Args:
        rendezvous: Its store has those who ask.
        before: The epoch that is over.
        records: What each of those who are there has said.
    """
    settings = before.members[before.place].settings
    asks = list_ready(rendezvous.store, settings)[: rendezvous.count_places(len(records))]
    members = [*records, *(asdict(each.member) for each in asks)]
    guests = [each.member.id for each in asks]
    number = rendezvous.store.add(_EPOCHS, 1)
    decision = {"epoch": number, "members": members, "guests": guests}
    proposal = json.dumps(decision)
    if before.store.compare_set(_DECISION, "", proposal).decode() == proposal:
        answer(rendezvous.store, asks, decision)


def call_roll(epoch: Epoch) -> None:
    """Wait until all members have come to form an epoch; all find the same ones missing, or none.

    Raises:
        MissingError: Some did not come in time, as the first one found that waited in vain.
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


def is_left_out(before: Epoch, own: Member) -> bool:
    """Return whether those who were in an epoch with this worker have decided on one without it."""
    if not before.store.check([_DECISION]):
        return False
    records = json.loads(before.store.get(_DECISION))["members"]
    return own.id not in [record["id"] for record in records]


def read_decision(rendezvous: Rendezvous, decision: Mapping[str, Any], own: Member) -> Epoch | None:
    """Make the epoch that was decided on; None if this worker is not in it."""
    members = [Member(**record) for record in decision["members"]]
    if own.id not in [member.id for member in members]:
        return None
    return _make(rendezvous.store, decision["epoch"], members, own, decision["guests"])


def _make(
    store: Any, number: int, members: list[Member], own: Member, guests: Collection[int] = ()
) -> Epoch:
    ordered = sorted(members, key=lambda member: (*[-each for each in member.progress], member.id))
    place = [member.id for member in ordered].index(own.id)
    part = PrefixStore(f"epoch {number}", store)
    ranks = tuple(rank for rank, member in enumerate(ordered) if member.id in guests)
    return Epoch(number, tuple(ordered), place, part, ranks)


def _await(store: Any, keys: list[str], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            raise FormingError("a worker left the rendezvous; the epoch is formed again")
        time.sleep(_POLL_S)


def connect(epoch: Epoch, *, timeout_s: float) -> dist.ProcessGroup:
    """Make the default process group of an epoch.

    Args:
        epoch: All its members call it.
        timeout_s: The longest that an operation on the group may take.

    Raises:
        FormingError: Somebody did not come to make it.
    """
    store = PrefixStore("group", epoch.store)
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

    It counts those that did not come about, too, and where it looks for the others in the store
    depends on the number: a worker that failed before would never meet one that did not.
    """
    alone = dist.HashStore()  # type: ignore[attr-defined]
    with _same_excepthook():
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    dist.destroy_process_group()


@contextmanager
def _same_excepthook() -> Iterator[None]:
    """Keep the hook of exceptions, in front of which torch puts another one for each group."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


def disconnect(*, has_failed: bool) -> None:
    """Give the default process group up."""
    group = dist.group.WORLD
    if group is None:
        return
    drop_store(group)
    if has_failed:
        # Its destructor may wait for peers that are silent.
        keep(group)
    del group
    dist.destroy_process_group()

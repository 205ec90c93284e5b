"""Epochs: a roster of workers, decided once for all of them, and the process group made for it.

    round ──members──► epoch 1 ──one is lost──► epoch 2 ──one asks──► epoch 3 ──in doubt──► round

The workers of a round of the rendezvous tell each other what they have, and are ordered alike: the
most advanced first. Where one of them is lost, the others have agreed on whom (``PeerWatch``), and
where one asks to be let in, all have left the epoch at the same step. So those who are left decide
on the next epoch among themselves, in milliseconds. Whatever is in doubt goes back to the
rendezvous, which takes seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew.admission import Ask, answer, list_ready
from distlion.crew.member import STRANGER, Member
from distlion.crew.rendezvous import FormingError, Rendezvous
from distlion.errors import CrewError
from distlion.transport import drop_store, keep, keep_store, watch_peers
from distlion.vote import Roster

QUICK_S = 2.0
"""How long those who are left wait for each other before they ask the rendezvous."""
FACTS_S = 10.0
"""How long the workers of a round wait for what each of them has."""
CONNECT_S, CONNECT_S_EACH = 4.0, 0.5
"""How long connections may take, and for each member more: one that has died meanwhile is waited
for. All are ready when it begins."""
_POLL_S = 0.005
_EPOCHS, _BEGUN, _IDS, _DECISION = "epochs", "begun", "ids", "decision"


@dataclass(frozen=True)
class Epoch:
    """Members between two changes of membership.

    Attributes:
        number: Greater than that of every epoch before.
        members: In the order of their ranks, the most advanced first.
        place: This worker's rank.
        store: A part of the store that this epoch has for itself.
    """

    number: int
    members: tuple[Member, ...]
    place: int
    store: Any

    @property
    def roster(self) -> Roster:
        """The voters: each counts a shard, and has one vote."""
        ids = tuple(member.id for member in self.members)
        return Roster(ids, ids, (1,) * len(ids), self.number)

    def describe(self) -> str:
        """Say in a line who is there."""
        names = ", ".join(map(str, self.members))
        return f"epoch {self.number}, step {self.members[0].step}: {len(self.members)}: {names}"

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


def take_id(store: Any) -> int:
    """Return a number that no other worker of the run gets."""
    return int(store.add(_IDS, 1)) - 1


def note_begun(store: Any, number: int) -> None:
    """Note that the members of an epoch have begun it."""
    if find_last_begun(store) < number:
        store.set(_BEGUN, str(number))


def find_last_begun(store: Any) -> int:
    """Return the number of the last epoch that has begun: others may have been given and not."""
    return int(store.get(_BEGUN)) if store.check([_BEGUN]) else 0


def meet(rendezvous: Rendezvous, own: Member, *, min_workers: int, limit_s: float) -> Epoch:
    """Form an epoch of all who come to the next round of the rendezvous.

    Args:
        rendezvous: Where workers meet.
        own: This worker.
        min_workers: The least that train.
        limit_s: How long to wait for them.

    Raises:
        TooFewError: They did not come in time.
        FormingError: Somebody who came is gone again, or cannot take part.
        CrewError: As ``Rendezvous.join``; or the others train with other settings than this worker.
    """
    found = rendezvous.join(limit_s)
    try:
        record: dict[str, Any] = {"member": asdict(own)}
        if found.place == 0:
            record["epoch"] = int(rendezvous.store.add(_EPOCHS, 1))
        found.store.set(f"member/{found.place}", json.dumps(record))
        keys = [f"member/{place}" for place in range(found.size)]
        _await(found.store, keys, FACTS_S)
        records = [json.loads(found.store.get(key)) for key in keys]
    except RuntimeError as error:
        raise FormingError(str(error)) from error
    members = leave_out_strangers([Member(**each["member"]) for each in records], own)
    if len(members) < min_workers:
        raise FormingError("too few are left who train with the same settings")
    return _make(rendezvous.store, records[0]["epoch"], members, own)


def leave_out_strangers(members: list[Member], own: Member) -> list[Member]:
    """Leave out who has other parameters or settings than those who train: it must not end the run.

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
) -> Epoch | None:
    """Form an epoch of those who are left, and of those who ask to be let in.

    All who are left know who is lost. The first one to see all of them there decides; so does the
    first one to wait in vain, who sends everybody to the rendezvous.

    Args:
        rendezvous: Its store keeps the decision.
        before: The epoch that is over.
        own: This worker, as it is now.
        lost: Ids of those who are lost, as all others found.
        min_workers: The least that train.

    Returns:
        The epoch; None where the rendezvous has to find out who is there.
    """
    left = [member.id for member in before.members if member.id not in lost]
    if own.id not in left or len(left) < min_workers:
        return None
    store = before.store
    try:
        store.set(f"next/{own.id}", json.dumps(asdict(own)))
        keys = [f"next/{each}" for each in left]
        deadline_s = time.monotonic() + QUICK_S
        while not (are_all := store.check(keys)) and not store.check([_DECISION]):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        if not store.check([_DECISION]):
            records = [json.loads(store.get(key)) for key in keys] if are_all else []
            _decide(rendezvous, before, records)
        decision = json.loads(store.get(_DECISION))
    except RuntimeError:
        return None
    return read_decision(rendezvous, decision, own)


def _decide(rendezvous: Rendezvous, before: Epoch, records: Sequence[dict[str, Any]]) -> None:
    """Decide on the next epoch, unless somebody has; none of it is where all go to the rendezvous.

    Args:
        rendezvous: Its store has those who ask.
        before: The epoch that is over.
        records: What each of those who are left has said; empty if some have said nothing.
    """
    decision: dict[str, Any] = {}
    asks: list[Ask] = []
    if records:
        settings = before.members[before.place].settings
        asks = list_ready(rendezvous.store, settings)[: rendezvous.count_places(len(records))]
        members = [*records, *(asdict(each.member) for each in asks)]
        decision = {"epoch": rendezvous.store.add(_EPOCHS, 1), "members": members}
    proposal = json.dumps(decision)
    if before.store.compare_set(_DECISION, "", proposal).decode() == proposal:
        answer(rendezvous.store, asks, decision)


def is_left_out(before: Epoch, own: Member) -> bool:
    """Return whether those who were in an epoch with this worker have decided on one without it."""
    if not before.store.check([_DECISION]):
        return False
    members = json.loads(before.store.get(_DECISION)).get("members", [])
    return bool(members) and own.id not in [record["id"] for record in members]


def read_decision(rendezvous: Rendezvous, decision: Mapping[str, Any], own: Member) -> Epoch | None:
    """Make the epoch that was decided on; None if this worker is not in it."""
    members = [Member(**record) for record in decision.get("members", [])]
    if own.id not in [member.id for member in members]:
        return None
    return _make(rendezvous.store, decision["epoch"], members, own)


def _make(store: Any, number: int, members: list[Member], own: Member) -> Epoch:
    ordered = sorted(members, key=lambda member: (-member.epoch, -member.step, member.id))
    place = [member.id for member in ordered].index(own.id)
    part = PrefixStore(f"epoch {number}", store)
    return Epoch(number, tuple(ordered), place, part)


def _await(store: Any, keys: list[str], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            raise FormingError("somebody who came to the rendezvous is gone again")
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
    depends on the number: who has failed before would never again meet somebody who has not.
    """
    alone = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    dist.destroy_process_group()


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

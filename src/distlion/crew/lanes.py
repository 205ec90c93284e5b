"""The processes of a member of a crew, its *lanes*, which enter and leave epochs together.

    lane 0       all lanes are here ──► finds the next epoch ──► tells the others
    lane i > 0   all lanes are here ───────────────────────────► hears of it

They talk through the crew's store: a question there has a limit, and heartbeats show who runs. The
member's own group is asked once, when it comes. A lane that is lost, silent or at another step ends
its member: the other lanes raise CrewError, and the member may come back as a newcomer. If all were
only late, so that the others went on without them, they meet and ask to be let in again.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew.epoch import (
    Epoch,
    FormingError,
    Member,
    TooFewError,
    connect,
    disconnect,
    listen,
    take_id,
)
from distlion.crew.store import Rendezvous
from distlion.errors import CrewError, InvalidArgumentError, ProcessGroupError, StepError
from distlion.step.ranks import Ranks, check_member
from distlion.wire.ask import ask_texts
from distlion.wire.gloo import Gloo
from distlion.wire.groups import drop_store, group_apart, keep, own_group, stand_in
from distlion.wire.heartbeats import Heartbeats
from distlion.wire.watch import PeerWatch, watch_peers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Find = Callable[[], Epoch]
Read = Callable[[Mapping[str, Any]], Epoch | None]

_POLL_S, _POLL_LATER_S, _SOON_S = 0.005, 0.1, 2.0
"""Seconds between two looks for words of other lanes, and those after which they are longer."""
_LISTEN_S, _LEFT = 0.2, "left"
_MEET_S = 600.0
"""Seconds until lanes that run have come to the same change of members."""
_ADVICE = (
    "start all processes of this member again, as torchrun --max-restarts does: it comes back as "
    "a newcomer"
)


class OneLane:
    """The only process of its member.

    Attributes:
        number: Number of the member's processes.
        lane: The number of this process among them.
    """

    number, lane = 1, 0
    alone = Ranks.alone()
    """This process between two epochs."""

    def describe(self) -> str:
        """Describe what must be equal on all members, in one line."""
        return f"processes of a member: {self.number}"

    @property
    def leads(self) -> bool:
        """True on the process that speaks for its member."""
        return self.lane == 0

    def begin(self, rendezvous: Rendezvous, *, silence_s: float) -> int:
        """Return the member's id, the same on all its processes."""
        return take_id(rendezvous.store)

    def find(
        self, own: Member, find: Find, *, read: Read, check: Callable[[Exception], None]
    ) -> Epoch:
        """Find the next epoch on the process that speaks for its member, and tell the others.

        Args:
            own: The member, as this process is.
            find: Function that finds the epoch.
            read: Function that makes the epoch of a decision.
            check: Function that raises CrewError if no attempt is to follow after this error.

        Raises:
            FormingError: As ``find``.
            CrewError: As ``find``; or the member is not whole.
        """
        return find()

    def connect(self, epoch: Epoch, *, timeout_s: float, silence_s: float) -> Ranks:
        """Make the process group of an epoch; all its members must call it.

        Args:
            epoch: The epoch.
            timeout_s: Limit of an operation on the group.
            silence_s: Seconds without a heartbeat after which a process is given up.

        Raises:
            FormingError: A process did not come to make it.
        """
        return Ranks.of(connect(epoch, timeout_s=timeout_s, silence_s=silence_s))

    def disconnect(self, ranks: Ranks, *, has_failed: bool) -> None:
        """Give up the process group of an epoch."""
        disconnect(has_failed=has_failed)

    def find_lost(self, culprits: Sequence[int], epoch: Epoch) -> tuple[int, ...]:
        """Find the places of members whose processes are lost.

        Args:
            culprits: Ranks of the processes.
            epoch: The epoch that they were in.

        """
        return tuple(culprits)

    def are_whole(self) -> bool:
        """Return whether no other process of this member is known to be lost; for one thread."""
        return True

    def leave(self, why: str) -> None:
        """Tell the other processes of this member that this one leaves the crew."""


def _find_group(member: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(member, dist.ProcessGroup):
        return member
    if getattr(member, "ndim", 0) != 1:
        raise InvalidArgumentError(
            f"member={member!r}: expected a process group, or a mesh of one dim, of all processes "
            "of this member"
        )
    return member.get_group()


_n_met: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often the processes of a group have come to a crew."""


class Lanes(OneLane):
    """The processes of a member that has several.

    Args:
        member: Their process group, or a mesh of one dim of them.

    Attributes:
        group: Their process group.

    Raises:
        InvalidArgumentError: The mesh has several dims.
        ProcessGroupError: This process is not in the group.
    """

    def __init__(self, member: dist.ProcessGroup | DeviceMesh) -> None:
        self.group = check_member(_find_group(member))
        self.number, self.lane = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.alone = replace(Ranks.alone(), has_own_groups=True)
        self._n_found = 0
        self._in_epoch: tuple[weakref.ref[PeerWatch], tuple[int, ...]] | None = None
        self._is_doubted = False
        stand_in(self, None)

    def describe(self) -> str:
        return f"{super().describe()}, in a group"

    def begin(self, rendezvous: Rendezvous, *, silence_s: float) -> int:
        identity = take_id(rendezvous.store) if self.leads else None
        _n_met[self.group] = _n_met.get(self.group, 0) + 1
        said = json.dumps([identity, rendezvous.name])
        try:
            own = own_group(self.group, name=f"crew {_n_met[self.group]}", timeout_s=_MEET_S)
            texts = ask_texts(Gloo(own, timeout_s=_MEET_S), said, step=0)
        except (StepError, ProcessGroupError) as error:
            raise CrewError(
                f"the processes of this member did not meet before they came ({error}); {_ADVICE}"
            ) from error
        told = list(map(json.loads, texts))
        if len({each[1] for each in told}) > 1:
            raise CrewError(
                f"processes of one member come to different crews: {[each[1] for each in told]}; "
                "give all of them the same endpoint, run_id= and secret"
            )
        self.id, self._rendezvous = int(told[0][0]), rendezvous
        self._store = rendezvous.begin_beating_inside(self.id, self.lane)
        self._heartbeats, self._heartbeats_beside = (
            Heartbeats(self._store.plain, self.lane, self.number, silence_s) for _ in range(2)
        )
        return self.id

    def find(
        self, own: Member, find: Find, *, read: Read, check: Callable[[Exception], None]
    ) -> Epoch:
        self._n_found += 1
        try:
            self._meet(own)
            return self._find(find, check) if self.leads else self._hear(read)
        except DistError as error:
            raise self._rendezvous.make_gone_error(error) from error

    def _meet(self, own: Member) -> None:
        """Wait for the other lanes, which must be as far as this one.

        Raises:
            CrewError: One is lost, or at another step.
        """
        mine = json.dumps([own.epoch, own.step, own.settings])
        self._store.set(self._name(f"lane {self.lane}"), mine)
        names = [self._name(f"lane {lane}") for lane in range(self.number)]
        self._await(names, limit_s=_MEET_S)
        self._check_others()  # one may have come and left since
        told = [self._store.read(name, json.loads) for name in names]
        if any(each != told[0] for each in told):
            self._fail(f"processes of this member have come to different steps: {told}")

    def _find(self, find: Find, check: Callable[[Exception], None]) -> Epoch:
        try:
            found = find()
        except BaseException as error:
            reason: dict[str, Any] = {"over": str(error)}
            if isinstance(error, FormingError):
                try:
                    check(error)
                    reason = {"failed": str(error)}
                except CrewError as final:
                    is_few = isinstance(error, TooFewError)
                    reason = {"over": str(final), "few": is_few}
            self._tell(reason)
            raise
        guests = [found.members[place].id for place in found.guests]
        members = [each.describe() for each in found.members]
        self._tell({"epoch": found.number, "members": members, "guests": guests})
        return found

    def _tell(self, said: Mapping[str, Any]) -> None:
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            self._store.set(self._name("next"), json.dumps(said))

    def _hear(self, read: Read) -> Epoch:
        name = self._name("next")
        self._await([name], limit_s=math.inf)
        told = self._store.read(name, json.loads)
        if "failed" in told:
            raise FormingError(told["failed"])
        if "over" in told:
            cause = TooFewError(told["over"]) if told.get("few") else None
            raise CrewError(told["over"]) from cause
        found = read(told)
        assert found is not None  # lane 0 is in it
        return found

    def _await(self, names: Sequence[str], *, limit_s: float) -> None:
        """Wait for words of other lanes.

        Raises:
            CrewError: One is silent, has left, or does not come.
        """
        now_s = time.monotonic()
        until_s, soon_s, listen_s = now_s + limit_s, now_s + _SOON_S, now_s
        while not self._store.check(names):
            now_s = time.monotonic()
            if now_s >= listen_s:
                listen_s = now_s + _LISTEN_S
                self._check_others()
            if now_s > until_s:
                self._fail(f"a process of this member did not come within {limit_s:g} s")
            time.sleep(_POLL_S if now_s < soon_s else _POLL_LATER_S)

    def _check_others(self) -> None:
        if self._store.check([_LEFT]):
            lane, why = self._store.read(_LEFT, json.loads)
            self._fail(f"process {lane} has left: {why}")
        others = [lane for lane in range(self.number) if lane != self.lane]
        for lane in self._heartbeats.find_silent(others):
            self._fail(f"of its {self.number} processes these are lost: {lane}")

    def _fail(self, why: str) -> NoReturn:
        raise CrewError(f"worker {self.id} leaves the crew: {why}; {_ADVICE}")

    def _name(self, what: str) -> str:
        return f"{self._n_found}/{what}"

    def connect(self, epoch: Epoch, *, timeout_s: float, silence_s: float) -> Ranks:
        rank, size = epoch.rank, len(epoch.names)
        try:
            group = group_apart(
                PrefixStore("group", epoch.store.plain),
                rank,
                size,
                timeout_s=timeout_s,
                connect_timeout_s=epoch.connect_timeout_s,
            )
        except ProcessGroupError as error:
            raise FormingError(str(error)) from error
        heartbeats = listen(epoch, silence_s=silence_s)
        watch = watch_peers(group, store_is_apart=True, heartbeats=heartbeats)
        watch.is_one_of_several = True
        stand_in(self, group)
        first = rank - self.lane
        inside = tuple(range(first, first + self.number))
        self._in_epoch, self._is_doubted = (weakref.ref(watch), inside), False
        return Ranks(
            group,
            rank,
            size,
            inside=inside,
            between=tuple(range(self.lane, size, self.number)),
        )

    def disconnect(self, ranks: Ranks, *, has_failed: bool) -> None:
        group = ranks.process_group
        stand_in(self, None)
        self._in_epoch = None
        if group is None:
            return
        if has_failed:
            keep(group)
        drop_store(group)

    def find_lost(self, culprits: Sequence[int], epoch: Epoch) -> tuple[int, ...]:
        places = epoch.find_places(culprits)
        # If all have only been late, they meet, and come back as one member.
        self._is_doubted |= epoch.place in places
        return places

    def are_whole(self) -> bool:
        if not self.leads:  # it speaks with nobody outside
            return True
        if self._is_doubted or self._store.check([_LEFT]):
            return False
        if self._in_epoch is not None:
            watch, inside = self._in_epoch[0](), self._in_epoch[1]
            if watch is not None and {*watch.lost} & {*inside}:
                return False
        return not self._heartbeats_beside.find_silent(range(1, self.number))

    def leave(self, why: str) -> None:
        with suppress(DistError):
            self._store.set(_LEFT, json.dumps([self.lane, why]))

"""The processes of a member meet before each change of members, and hear of the next epoch."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import distlion
from crews import await_true
from distlion.crew.admission import Ask
from distlion.crew.epoch import Epoch, FormingError, Member, TooFewError
from distlion.crew.lanes import Lanes
from distlion.crew.membership import decide_among
from distlion.crew.signed import SignedStore
from distlion.crew.store import Address, Rendezvous, name_epoch
from distlion.errors import CrewError
from distlion.wire.heartbeats import Heartbeats, beat


def make_store() -> SignedStore:
    return SignedStore(dist.HashStore(), b"key")  # type: ignore[attr-defined]


def make_member(step: int = 40) -> Member:
    return Member(3, 2, step, 17, "host", 100, processes=2)


def make_lanes(store: SignedStore, number: int = 2, silence_s: float = 60.0) -> list[Lanes]:
    """Make the processes of a member without processes."""
    made = []
    for lane in range(number):
        lanes = Lanes.__new__(Lanes)
        lanes.number, lanes.lane, lanes.id, lanes._n_found = number, lane, 3, 0
        lanes._store = store
        lanes._heartbeats = Heartbeats(store.plain, lane, number, silence_s)
        lanes._heartbeats_beside = Heartbeats(store.plain, lane, number, silence_s)
        lanes._in_epoch, lanes._is_doubted = None, False
        made.append(lanes)
    return made


def find_all(
    found: list[Lanes],
    members: list[Member],
    find: Callable[[], Epoch],
    *,
    check: Callable[[Exception], None] = lambda error: None,
) -> list[Any]:
    """Let all processes find the next epoch; return it, or the error of each."""
    store, results = make_store(), [None] * len(found)

    def read(told: Any) -> Epoch:
        return Epoch(told["epoch"], tuple(Member(**each) for each in told["members"]), 0, store)

    def run(lane: int) -> None:
        try:
            results[lane] = found[lane].find(members[lane], find, read=read, check=check)
        except (CrewError, FormingError) as error:
            results[lane] = error

    threads = [
        threading.Thread(target=run, args=(lane,), daemon=True) for lane in range(len(found))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return results


def make_epoch(number: int) -> Epoch:
    return Epoch(number, (make_member(),), 0, make_store())


def test_all_processes_hear_of_the_epoch_that_the_first_one_finds() -> None:
    lanes, members = make_lanes(make_store(), 3), [make_member()] * 3
    for number in (4, 9):
        results = find_all(lanes, members, lambda number=number: make_epoch(number))
        assert [(each.number, each.members) for each in results] == [(number, (make_member(),))] * 3


def test_processes_at_different_steps_end_all_of_them() -> None:
    lanes = make_lanes(make_store())
    results = find_all(lanes, [make_member(40), make_member(41)], lambda: make_epoch(4))
    for each in results:
        assert isinstance(each, CrewError)
        assert "have come to different steps: [[2, 40, 17], [2, 41, 17]]" in str(each)


def fail(error: Exception) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


def test_all_processes_try_again_where_no_epoch_is_found() -> None:
    lanes, members = make_lanes(make_store()), [make_member()] * 2
    first, second = find_all(lanes, members, fail(FormingError("one is gone")))
    assert type(first) is type(second) is FormingError and str(second) == "one is gone"
    results = find_all(lanes, members, lambda: make_epoch(4))
    assert [each.number for each in results] == [4, 4]


def test_all_processes_end_with_the_first_one() -> None:
    lanes, members = make_lanes(make_store()), [make_member()] * 2
    final = fail(CrewError("nobody came"))
    first, second = find_all(lanes, members, fail(TooFewError("few")), check=final)
    assert isinstance(first, TooFewError)
    assert isinstance(second, CrewError) and isinstance(second.__cause__, TooFewError)
    _, second = find_all(lanes, members, fail(CrewError("the run is over")))
    assert str(second) == "the run is over" and second.__cause__ is None


def test_process_does_not_wait_for_one_that_has_left_or_is_silent() -> None:
    store = make_store()
    here, gone = make_lanes(store)
    gone.leave("ValueError: bad")
    (error,) = find_all([here], [make_member()], lambda: make_epoch(4))
    assert isinstance(error, CrewError) and "process 1 has left: ValueError: bad" in str(error)
    store = make_store()
    here, _ = make_lanes(store, silence_s=0.05)
    beat(store.plain, 1, 5)
    (error,) = find_all([here], [make_member()], lambda: make_epoch(4))
    assert isinstance(error, CrewError) and "of its 2 processes these are lost: 1" in str(error)


class GoneStore:
    """Stands in for a store that does not answer."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("connection reset")


def test_process_without_a_store_is_told_to_start_it_again() -> None:
    (here,) = make_lanes(make_store(), 1)
    here._store = GoneStore()  # type: ignore[assignment]
    here._rendezvous = Rendezvous.__new__(Rendezvous)
    here._rendezvous._address = Address("head:29400", "run", 5)
    (error,) = find_all([here], [make_member()], lambda: make_epoch(4))
    assert isinstance(error, CrewError) and "resume all workers from a checkpoint" in str(error)


class FixedWatch:
    """Stands in for the watch of an epoch."""

    lost: tuple[int, ...] = ()


def test_first_process_knows_when_its_member_is_broken() -> None:
    store = make_store()
    here, other = make_lanes(store, silence_s=1)
    watch = FixedWatch()
    here._in_epoch = weakref.ref(watch), (2, 3)  # type: ignore[assignment]
    assert here.are_whole()
    watch.lost = (0,)
    assert here.are_whole()
    watch.lost = (0, 3)
    assert not here.are_whole() and other.are_whole()
    watch.lost = ()
    assert here.are_whole()
    await_true(lambda: not here.are_whole())  # no heartbeat
    beat(store.plain, 1, 5)
    assert here.are_whole()
    other.leave("ValueError: bad")
    assert not here.are_whole()


class FixedCrew:
    """Stands in for a crew, of which a sampler reads places."""

    def __init__(self, rank: int, lane: int) -> None:
        self.rank, self.size, self.lane, self.n_lanes = rank, 2, lane, 3

    def admit(self) -> bool:
        return False

    def carry(self, **carried: Any) -> None:
        self.carried = carried


def test_each_process_takes_examples_of_its_own() -> None:
    crews: list[Any] = [FixedCrew(rank, lane) for rank in range(2) for lane in range(3)]
    samplers = [distlion.CrewSampler(crew, n_examples=24, batch_size=2) for crew in crews]
    taken = []
    for _ in range(2):
        for sampler in samplers:
            taken += sampler.take()
            sampler.advance()
    assert sorted(taken) == list(range(24))


class Places:
    """Stands in for a rendezvous where nobody has trained."""

    has_signs = False

    def __init__(self, store: SignedStore) -> None:
        self.store = store

    def find_last_begun(self) -> int:
        return 0

    def is_somebody_alive(self) -> bool:
        return False

    def name_crew(self) -> str:
        return "the crew of this test"

    def count_places(self, n_members: int) -> int:
        return 8 - n_members


def test_those_that_begin_together_have_as_many_processes() -> None:
    store = make_store()
    asks = [
        Ask(number, Member(number, 0, 0, 17, "host", 100, processes=processes))
        for number, processes in enumerate((2, 4, 2))
    ]
    decide_among(Places(store), asks, min_workers=2)  # type: ignore[arg-type]
    one, other, two = (store.read(each.answer, json.loads) for each in asks)
    assert one == two and [each["id"] for each in one["members"]] == [0, 2]
    assert "has 2 processes, and this one 4 processes" in other["refused"]


def test_process_without_a_group_and_a_group_of_one_do_not_begin_together() -> None:
    store = make_store()
    asks = [
        Ask(number, Member(number, 0, 0, 17, "host", 100, has_group=number == 1))
        for number in range(3)
    ]
    decide_among(Places(store), asks, min_workers=2)  # type: ignore[arg-type]
    one, other, two = (store.read(each.answer, json.loads) for each in asks)
    assert one == two and [each["id"] for each in one["members"]] == [0, 2]
    assert "is a process without a group" in other["refused"]
    assert "this one is given as Crew(member=...)" in other["refused"]


def test_ranks_of_a_member_follow_each_other() -> None:
    members = tuple(Member(each, 2, 40, 17, "host", 100, processes=3) for each in (7, 4))
    epoch = Epoch(5, members, 1, make_store().at(name_epoch(5)), lane=2)
    assert (epoch.rank, epoch.n_lanes) == (5, 3)
    assert epoch.names == ["7.0", "7.1", "7.2", "4.0", "4.1", "4.2"]
    assert epoch.find_places([1, 2, 4]) == (0, 1)

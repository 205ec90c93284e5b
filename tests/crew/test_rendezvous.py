"""What all workers of a run write into its store, and large handovers."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crews import await_true, host_store
from distlion.crew import carried, lookout, memory
from distlion.crew import store as crew_store
from distlion.crew.admission import Ask
from distlion.crew.epoch import FormingError, Member
from distlion.crew.lifeline import Connections
from distlion.crew.membership import decide_among
from distlion.crew.signed import SignedStore
from distlion.crew.store import Rendezvous
from distlion.errors import CrewError


def make_rendezvous(port: int) -> Rendezvous:
    return Rendezvous(
        f"127.0.0.1:{port}", run_id="run", secret="of this test", min_workers=2, max_workers=9
    )


def test_a_run_that_is_closed_lets_nobody_in() -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    rendezvous.check_open()
    other.close()
    # The store answers the worker that has closed it only once it has read that.
    for each in (other, rendezvous):
        with pytest.raises(CrewError, match="the run is over"):
            each.check_open()
    rendezvous.end()


def test_the_number_of_the_last_epoch_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    assert rendezvous.find_last_begun() == 0
    looks, read = [], memory.read_begun

    def read_late(keys: SignedStore) -> int:
        """Look, and let another worker note a later epoch before this one notes its own."""
        found = read(keys)
        if not looks:
            looks.append(found)
            other.note_begun(6)
        return found

    monkeypatch.setattr(memory, "read_begun", read_late)
    rendezvous.note_begun(5)
    assert looks == [0]
    assert rendezvous.find_last_begun() == 6


def test_an_epoch_of_which_a_worker_has_heard_has_begun_in_an_empty_store_too() -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    other.note_begun(5)
    assert rendezvous.find_last_begun() == 5
    store.delete_key("distlion/run/begun")
    assert rendezvous.find_last_begun() == 5  # so newcomers that come back wait for members
    rendezvous.end()
    other.end()


def test_a_socket_of_another_kind_that_others_open_meanwhile_is_no_connection() -> None:
    store, opened = host_store(), list[socket.socket]()

    def connect() -> Any:
        opened.extend(socket.socketpair())  # as data loaders do, on threads of their own
        return dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]

    connections = Connections(connect, 5)
    connections.make()
    assert connections.can_be_cut
    connections.cut()
    opened[0].send(b"1")  # it was not cut with the connections
    assert opened[1].recv(1) == b"1"
    for each in opened:
        each.close()


def test_a_word_of_the_living_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = host_store(), [100.0]
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    monkeypatch.setattr(crew_store, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def say(word: str) -> None:
        other.say_alive(word)
        assert other.has_signs  # the store answers this once it has the word

    def is_alive_after(seconds: float) -> bool:
        now_s[0] += seconds
        return rendezvous.is_somebody_alive()

    assert not is_alive_after(0.0)
    for word in ("0 0", "0 1"):  # the first one may be of one that is dead now
        say(word)
        assert [is_alive_after(0.5) for _ in range(10)] == [True] * 8 + [False] * 2
    say("0 2")
    assert is_alive_after(0.5)
    assert is_alive_after(60.0)  # this worker itself was held up
    assert [is_alive_after(0.5) for _ in range(8)] == [True] * 6 + [False] * 2
    rendezvous.end()
    other.end()


@pytest.mark.parametrize(("silence_s", "alive_s"), [(1.0, crew_store.ALIVE_S), (10.0, 20.0)])
def test_members_that_may_be_silent_for_long_live_for_long(
    silence_s: float, alive_s: float
) -> None:
    store = host_store()
    rendezvous = Rendezvous(
        f"127.0.0.1:{store.port}",
        run_id="run",
        secret="of this test",
        min_workers=2,
        max_workers=9,
        silence_s=silence_s,
    )
    assert rendezvous._alive_s == alive_s
    rendezvous.end()


def test_who_asks_shows_nobody_that_one_who_trains_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    said, looked = list[str](), threading.Event()
    monkeypatch.setattr(lookout, "LOOK_S", 0.01)
    rendezvous: Any = SimpleNamespace(
        pulse=SimpleNamespace(is_led=True), trouble=None, say_alive=said.append
    )
    lanes: Any = SimpleNamespace(leads=True, are_whole=lambda: looked.set() or True)
    look = lookout.Lookout(rendezvous, 0, lanes)
    look.is_outside = look._has_trained = True
    for _ in range(3):
        looked.clear()
        assert looked.wait(10)
    assert said == []
    look.is_outside = False
    await_true(lambda: bool(said))
    look.ended.set()


def test_newcomers_begin_nothing_while_members_come_back_to_an_empty_store() -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    members = [{"id": each} for each in range(2)]
    memory_of_member = memory.Memory(now="epoch 7")
    memory_of_member.note_decision({"crew": "of the members", "epoch": 7, "members": members})
    memory_of_member.note_begun(7)
    asks = [Ask(each, Member(each, 0, 0, 17, "host", each)) for each in range(2)]
    assert rendezvous.find_last_begun() == 0
    memory_of_member.restore(other.store)
    decide_among(rendezvous, asks, min_workers=2)
    assert not any(other.store.check([each.answer]) for each in asks)
    assert other.store.get(memory.CREW) == "of the members"
    assert not rendezvous.memory.crew
    rendezvous.end()
    other.end()


def test_who_listens_and_never_answers_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_store, "_NAME_SERVERS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = crew_store.Address(f"127.0.0.1:{mute.getsockname()[1]}", "run", 0.5)
        with pytest.raises(CrewError, match="no store answers"):
            address.connect()


def test_waits_for_a_store_that_comes_and_goes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, store = 0.0, host_store()
    rendezvous = make_rendezvous(store.port)
    rendezvous.end()

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += 100
        rendezvous._connections = SimpleNamespace(are_away=False)  # type: ignore[assignment]

    def lose_store() -> bool:
        away = SimpleNamespace(are_away=True, trouble=None)
        rendezvous._connections = away  # type: ignore[assignment]
        return rendezvous.await_back(dist.DistNetworkError("it is away"))

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=wait)
    monkeypatch.setattr(crew_store, "time", clock)
    for _ in range(2):
        assert [lose_store() for _ in range(6)] == [True] * 6
        with pytest.raises(CrewError, match="it stayed away for 600 s"):
            lose_store()
        rendezvous.note_entered()


def test_a_state_of_many_megabytes_is_handed_over_and_forgotten() -> None:
    store = host_store()
    connection = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    client = SignedStore(connection, b"of this test")
    state: dict[str, Any] = {"losses": "é" * (9 << 20), "steps": [1, 2]}
    carried.give(client, state)
    taken = carried.take(client, limit_s=5, watch=None)
    assert taken == state
    carried.clear(client)
    assert not client.check(["handover/0"])


def test_what_is_not_handed_over_is_not_waited_for() -> None:
    store = SignedStore(dist.HashStore(), b"of this test")  # type: ignore[attr-defined]
    with pytest.raises(FormingError, match="is gone"):
        carried.take(store, limit_s=0, watch=None)


class Listening:
    """A watch that listens to others only while this worker waits, and finds that one is lost."""

    def __init__(self) -> None:
        self.alarmed, self.waiting = threading.Event(), set[object]()

    def enter_exchange(self, transfer: object) -> None:
        self.waiting.add(transfer)
        self.alarmed.set()

    def leave_exchange(self, transfer: object) -> None:
        self.waiting.discard(transfer)


def test_a_giver_that_is_lost_is_not_waited_for() -> None:
    store = SignedStore(dist.HashStore(), b"of this test")  # type: ignore[attr-defined]
    watch: Any = Listening()
    with pytest.raises(FormingError, match="is gone"):
        carried.take(store, limit_s=60, watch=watch)
    assert not watch.waiting


def test_a_giver_without_a_state_to_give_says_so() -> None:
    store = SignedStore(dist.HashStore(), b"of this test")  # type: ignore[attr-defined]
    carried.give(store, {"scheduler": {"best": torch.ones(2)}})
    with pytest.raises(CrewError, match=r"nothing to hand over .*scheduler.best is a tensor"):
        carried.take(store, limit_s=60, watch=None)

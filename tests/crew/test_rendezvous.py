"""Limits and interruptions of a wait at the rendezvous, and large handovers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from crews import await_true, host_store
from distlion.crew import carried
from distlion.crew.rendezvous import (
    FormingError,
    OthersTrainError,
    Rendezvous,
    TooFewError,
    _find_keep_alive,
)
from distlion.crew.store import SignedStore


def make_rendezvous(port: int) -> Rendezvous:
    return Rendezvous(
        f"127.0.0.1:{port}", run_id="run", secret="of this test", min_workers=2, max_workers=9
    )


def test_one_that_waits_alone_gives_up_in_time() -> None:
    store = host_store()
    with pytest.raises(TooFewError, match="fewer than 2 workers came"):
        make_rendezvous(store.port).join(0.5, 0)


def test_the_limit_of_a_later_round_is_its_own() -> None:
    store = host_store()
    rendezvous = make_rendezvous(store.port)
    rendezvous._handler = rendezvous._make_handler(600)
    with pytest.raises(TooFewError):
        rendezvous.join(0.5, 0)


def test_one_that_waits_sees_that_others_begin() -> None:
    store = host_store()
    first, second = make_rendezvous(store.port), make_rendezvous(store.port)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            first.join(20, 0)
        except FormingError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    await_true(lambda: first._begun_before is not None)
    second.note_begun(3)
    waiting.join()
    assert isinstance(caught[0], OthersTrainError)


def test_the_number_of_the_last_epoch_never_falls() -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    assert rendezvous.find_last_begun() == 0
    looks, find = [], rendezvous.find_last_begun

    def find_late() -> int:
        """Look, and let another worker note a later epoch before this one notes its own."""
        found = find()
        if not looks:
            looks.append(found)
            other.note_begun(6)
        return found

    rendezvous.find_last_begun = find_late  # type: ignore[method-assign]
    rendezvous.note_begun(5)
    assert looks == [0]
    assert find() == 6


def test_a_word_of_the_living_is_heard() -> None:
    store = host_store()
    rendezvous, other = make_rendezvous(store.port), make_rendezvous(store.port)
    assert not rendezvous.is_somebody_alive()
    other.say_alive("0 0")
    assert not rendezvous.is_somebody_alive()
    ended = threading.Event()

    def live() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            other.say_alive(f"0 {number}")

    living = threading.Thread(target=live)
    living.start()
    assert rendezvous.is_somebody_alive()
    ended.set()
    living.join()


def test_a_state_of_many_megabytes_is_handed_over_and_forgotten() -> None:
    store = host_store()
    connection = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    client = SignedStore(connection, b"of this test")
    state: dict[str, Any] = {"losses": "é" * (9 << 20), "steps": [1, 2]}
    carried.give(client, state)
    taken = carried.take(client, limit_s=5, is_over=lambda: False)
    assert taken == state
    carried.clear(client)
    assert not client.check(["handover/0"])


def test_what_is_not_handed_over_is_not_waited_for() -> None:
    store = SignedStore(dist.HashStore(), b"of this test")  # type: ignore[attr-defined]
    with pytest.raises(FormingError, match="is gone"):
        carried.take(store, limit_s=60, is_over=lambda: True)
    with pytest.raises(FormingError, match="is gone"):
        carried.take(store, limit_s=0, is_over=lambda: False)


def test_torch_2_6_is_not_asked_for_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _find_keep_alive()

    def from_backend(run_id: str, store: Any, backend: Any) -> None:
        """Make a handler, as torch 2.6 does."""

    monkeypatch.setattr(
        "distlion.crew.rendezvous.DynamicRendezvousHandler",
        SimpleNamespace(from_backend=from_backend),
    )
    assert _find_keep_alive() == {}

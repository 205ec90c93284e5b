"""Workers that ask where nobody trains begin together, and only there."""

from __future__ import annotations

import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from asks import (
    SETTINGS,
    ask_of,
    ask_together,
    make_member,
    make_rendezvous,
    make_store,
    put_ask,
)
from crews import await_true
from distlion.crew import admission
from distlion.crew.admission import ask, list_asks
from distlion.crew.membership import decide_among
from distlion.crew.store import ALIVE_S


@pytest.fixture
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SEEN_S": 0.2, "LAST_CALL_S": 0.3, "_BEAT_S": 0.05}.items():
        monkeypatch.setattr(admission, name, seconds)


@pytest.mark.usefixtures("_in_a_hurry")
def test_those_that_ask_begin_together_where_nobody_trains() -> None:
    store = make_store()
    first, *others = ask_together(make_rendezvous(store), *map(make_member, (7, 8, 9)))
    assert sorted(record["id"] for record in first["members"]) == [7, 8, 9]
    assert others == [first] * 2
    assert first["guests"] == []
    assert list_asks(store) == []


def test_all_that_passes_in_silence_passes_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, heard_s = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def is_somebody_alive() -> bool:
        heard_s.append(now_s)
        return now_s < heard_s[0] + ALIVE_S  # as of one that has just died

    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    store, member = make_store(), make_member(7, epoch=0)
    rendezvous = make_rendezvous(store)
    rendezvous.is_somebody_alive = is_somebody_alive
    decide = partial(decide_among, rendezvous, min_workers=1)
    ask(rendezvous, member, min_workers=1, limit_s=60, decide=decide)
    longest_s = max(admission.SEEN_S, admission.LAST_CALL_S, ALIVE_S)
    assert longest_s <= now_s - 100 <= longest_s + 3 * admission._BEAT_S


@pytest.mark.usefixtures("_in_a_hurry")
def test_nobody_waits_for_one_that_has_asked_and_died() -> None:
    store = make_store()
    dead = put_ask(store, 0, make_member(6), is_ready=True)
    store.set(dead.alive, "9")
    first, second = ask_together(make_rendezvous(store), *map(make_member, (7, 8)))
    assert sorted(record["id"] for record in first["members"]) == [7, 8]
    assert second == first


@pytest.mark.usefixtures("_in_a_hurry")
def test_of_too_many_that_ask_the_most_advanced_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LAST_CALL_S", 60)  # with so many nobody waits for more
    store = make_store()
    asks = [put_ask(store, n, make_member(7 + n, epoch=n), is_ready=False) for n in range(3)]
    decide_among(make_rendezvous(store, places=2), asks, min_workers=2)
    answers = [store.read(each.answer, json.loads) for each in asks[1:]]
    assert [record["id"] for record in answers[0]["members"]] == [9, 8]
    assert list_asks(store) == asks[:1]
    answered = ask_together(make_rendezvous(make_store(), places=2), *map(make_member, (1, 2)))
    assert len(answered) == 2


def test_those_with_other_settings_than_the_most_advanced_are_sent_away() -> None:
    store = make_store()
    members = make_member(7), make_member(8), make_member(9, settings=SETTINGS + 1, epoch=0)
    asks = [put_ask(store, number, each, is_ready=False) for number, each in enumerate(members)]
    decide_among(make_rendezvous(store), asks, min_workers=2)
    assert ["epoch" in store.read(each.answer, json.loads) for each in asks] == [True, True, False]


def test_newcomers_alone_begin_only_where_nobody_lives_that_has_trained() -> None:
    store, rendezvous = make_store(), make_rendezvous(make_store())
    rendezvous.store = store
    members = [make_member(each, epoch=0, settings=each) for each in (7, 8)]
    asks = [put_ask(store, number, each, is_ready=False) for number, each in enumerate(members)]
    rendezvous.is_somebody_alive = lambda: True
    decide_among(rendezvous, asks, min_workers=2)
    assert list_asks(store) == asks
    rendezvous.is_somebody_alive = lambda: False
    decide_among(rendezvous, asks, min_workers=2)
    # The handshake says what differs.
    assert all(store.read(each.answer, json.loads) for each in asks)


@pytest.mark.parametrize(("epoch", "is_answered"), [(2, False), (3, True)])
def test_who_has_missed_an_epoch_begins_only_where_nobody_lives_that_has_trained(
    epoch: int, is_answered: bool
) -> None:
    store, rendezvous = make_store(), make_rendezvous(make_store())
    rendezvous.store, rendezvous.is_somebody_alive = store, lambda: True
    members = [make_member(7, epoch=epoch), make_member(8, epoch=0)]
    asks = [put_ask(store, number, each, is_ready=False) for number, each in enumerate(members)]
    decide_among(rendezvous, asks, min_workers=2)  # of a run whose last epoch is 3
    assert [store.check([each.answer]) for each in asks] == [is_answered] * 2


@pytest.mark.usefixtures("_in_a_hurry")
def test_one_that_was_taken_for_gone_asks_again() -> None:
    store, found = make_store(), list[Any]()
    asking = threading.Thread(
        target=lambda: found.append(ask_of(make_rendezvous(store), make_member(7)))
    )
    asking.start()
    await_true(lambda: bool(list_asks(store)))
    admission.withdraw(store, list_asks(store))
    await_true(lambda: bool(list_asks(store)))
    ask_of(make_rendezvous(store), make_member(8))
    asking.join()
    assert sorted(record["id"] for record in found[0]["members"]) == [7, 8]

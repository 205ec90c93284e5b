"""A member that sends no heartbeat is silent, by the time that the others have listened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distlion.wire import heartbeats
from distlion.wire.heartbeats import BEAT_S, N_HEARD, RETURN_S, Heartbeats, beat

SILENCE_S = 1.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def host_keys() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def look_for(heard: Heartbeats, clock: Clock, seconds: float) -> tuple[int, ...]:
    """Look as often as a worker that waits; return what was found last."""
    found: tuple[int, ...] = ()
    for _ in range(round(seconds / BEAT_S)):
        clock.now_s += BEAT_S
        found = heard.find_silent()
    return found


def test_member_without_heartbeats_is_silent_after_silence_s_and_not_before(clock: Clock) -> None:
    store = host_keys()
    heard = Heartbeats(store, 0, 3, SILENCE_S)
    beat(store, 1, 1)
    beat(store, 2, 1)
    heard.find_silent()
    for number in range(2, 12):
        beat(store, 2, number)
        clock.now_s += BEAT_S
        is_time = number - 1 >= round(SILENCE_S / BEAT_S)
        assert heard.find_silent() == ((1,) if is_time else ()), number


def test_member_that_has_never_sent_one_is_silent_too(clock: Clock) -> None:
    heard = Heartbeats(host_keys(), 0, 2, SILENCE_S)
    heard.find_silent()
    assert look_for(heard, clock, SILENCE_S) == (1,)


def test_heartbeat_after_a_pause_begins_the_silence_anew(clock: Clock) -> None:
    store = host_keys()
    heard = Heartbeats(store, 0, 2, SILENCE_S)
    heard.find_silent()
    assert look_for(heard, clock, SILENCE_S - BEAT_S) == ()
    beat(store, 1, 1)
    assert look_for(heard, clock, SILENCE_S) == ()
    assert look_for(heard, clock, BEAT_S) == (1,)


def test_one_that_was_held_up_itself_does_not_find_others_silent(clock: Clock) -> None:
    store = host_keys()
    heard = Heartbeats(store, 0, 2, SILENCE_S)
    beat(store, 1, 1)
    heard.find_silent()
    clock.now_s += 60  # all processes of a machine were stopped, and go on at once
    assert heard.find_silent() == ()
    beat(store, 1, 2)
    clock.now_s += BEAT_S
    assert heard.find_silent() == ()


def test_silence_counts_for_nothing_while_others_may_come_back_to_the_store(clock: Clock) -> None:
    store = host_keys()
    heard = Heartbeats(store, 0, 2, SILENCE_S)
    heard.find_silent()
    assert look_for(heard, clock, SILENCE_S - BEAT_S) == ()
    heard.begin_anew()  # the store was away, and is empty
    assert heard.find_silent() == ()
    beat(store, 1, 1)
    assert look_for(heard, clock, RETURN_S - BEAT_S) == ()
    assert look_for(heard, clock, SILENCE_S) == (1,)


@pytest.mark.parametrize("word", [None, 7], ids=["an empty store", "the same store"])
def test_one_that_finds_the_next_store_late_counts_from_its_first_heartbeat(
    word: int | None, clock: Clock
) -> None:
    store = host_keys()
    if word is not None:
        beat(store, 1, word)
    heard = Heartbeats(store, 0, 2, SILENCE_S)
    heard.begin_anew()
    assert look_for(heard, clock, 5 * RETURN_S) == ()
    beat(store, 1, 8)
    assert look_for(heard, clock, SILENCE_S) == ()
    assert look_for(heard, clock, 2 * BEAT_S) == (1,)


def test_one_that_stays_absent_is_silent_where_nobody_waits_for_it_in_a_step(clock: Clock) -> None:
    heard = Heartbeats(host_keys(), 0, 2, SILENCE_S)
    heard.begin_anew(absence_s=5 * RETURN_S)
    assert look_for(heard, clock, 5 * RETURN_S - BEAT_S) == ()
    assert look_for(heard, clock, 2 * BEAT_S) == (1,)


@pytest.mark.parametrize("rank", [0, 5, 39])
def test_member_of_a_large_group_listens_to_the_next_ones_only(rank: int, clock: Clock) -> None:
    heard = Heartbeats(host_keys(), rank, 40, SILENCE_S)
    heard.find_silent()
    expected = sorted((rank + place) % 40 for place in range(1, N_HEARD + 1))
    assert look_for(heard, clock, SILENCE_S) == tuple(expected)

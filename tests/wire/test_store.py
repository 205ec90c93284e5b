"""What workers of an earlier start have left in a store is nothing to those of a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from distlion.wire.groups import keep_store, store_of
from distlion.wire.turns import Turn
from distlion.wire.watch import watch_peers

COUNT, KEPT = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Return a group of this process alone, over a store that stays."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_an_alarm_of_an_earlier_start_alarms_nobody(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEPT, "True")
    monkeypatch.setenv(COUNT, "0")
    store_of(group).set("distlion/alarm", "lost")
    assert store_of(group).check(["distlion/alarm"])
    monkeypatch.setenv(COUNT, "1")
    assert not store_of(group).check(["distlion/alarm"])
    watch = watch_peers(group)
    assert watch.look() and not watch.alarmed.is_set()


def test_where_each_start_has_its_own_store_counts_may_differ(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEPT, "False")
    monkeypatch.setenv(COUNT, "0")
    store_of(group).set("place", "here")
    monkeypatch.setenv(COUNT, "1")
    assert store_of(group).get("place") == b"here"


def test_without_torchrun_all_is_in_the_store_itself(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    store_of(group).set("distlion/alarm", "lost")
    watch = watch_peers(group)
    watch.look()
    assert watch.alarmed.is_set()


def test_a_store_behind_a_slow_link_has_as_long_as_an_exchange_to_answer(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_after_s, watch = 50.0, watch_peers(group)

    def ask(limit_s: float, look: Callable[[], bool]) -> bool | None:
        return look() if limit_s >= answers_after_s else None

    monkeypatch.setattr("distlion.wire.watch.within", ask)
    watch._entered_s = [time.monotonic() - 1000.0] * 2
    assert not watch.is_given_up(60.0)
    assert watch.is_given_up(40.0)


def test_a_store_that_is_silent_for_as_long_as_an_exchange_may_take_ends_the_step(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, released = watch_peers(group), threading.Event()
    monkeypatch.setattr(watch, "look", released.wait)
    watch._entered_s = [time.monotonic() - 1000.0] * 2
    assert watch.is_given_up(0.01)
    released.set()


def test_whoever_leaves_is_waited_for_at_calls_that_it_has_completed(
    group: dist.ProcessGroup,
) -> None:
    watch = watch_peers(group)
    watch.leave(5, "an interrupt")
    watch.leave(4, "a later one")
    watch.turns.now = Turn(4, 0, "step 3")
    assert watch.read_left() is None
    watch.turns.now = Turn(5, 0, "step 4")
    assert watch.read_left() == {"rank": 0, "turn": 5, "why": "an interrupt"}


class GoneAfter:
    """A store whose host leaves after some answers."""

    def __init__(self, n_answers: int) -> None:
        self.n_answers = n_answers

    def check(self, keys: list[str]) -> bool:
        if not self.n_answers:
            raise RuntimeError("connection reset")
        self.n_answers -= 1
        return False


@pytest.mark.parametrize(("n_answers", "is_given_up"), [(1, False), (0, True)])
def test_a_host_that_leaves_once_it_is_seen_that_nobody_alarmed_gives_nobody_up(
    n_answers: int, is_given_up: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of a run: whoever keeps the store has all bytes, ends, and takes it away."""
    watch = watch_peers(group)
    watch._ended.set()  # nobody else looks meanwhile
    monkeypatch.setattr(watch, "_store", GoneAfter(n_answers))
    watch._entered_s = [time.monotonic() - 1000.0] * 2
    watch._looked_s = time.monotonic() - 1000.0
    watch._waiting.add(object())
    assert watch.is_given_up(30.0) == is_given_up


class Away:
    """A store that is away until it is back, and then empty."""

    def __init__(self) -> None:
        self.back: dist.Store | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        if self.back is None:
            raise dist.DistNetworkError("the store is away")
        found: Callable[..., object] = getattr(self.back, name)
        return found


def test_alarm_that_a_store_has_missed_is_raised_once_it_is_back(
    group: dist.ProcessGroup,
) -> None:
    away = Away()
    keep_store(group, away)
    watch = watch_peers(group, store_is_apart=True)
    assert watch.agree_on_failure("lost").culprits == ()
    with pytest.raises(RuntimeError):
        watch.look()
    assert watch.go_on_without_store()
    away.back = dist.HashStore()
    deadline_s = time.monotonic() + 30
    while not away.back.check(["distlion/alarm"]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert away.back.get("distlion/alarm") == b"lost"

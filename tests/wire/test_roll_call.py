"""Roll calls over a store, and how long a worker waits by the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch.distributed as dist

from distlion.wire import roll_call
from distlion.wire.finding import Answer, find_busy
from distlion.wire.roll_call import Patience, RollCall, RollCalls
from distlion.wire.turns import Turn

TURN = Turn(3, 0, "step()")
LIMIT_S, BUSY_S = 60.0, 1800.0


def waits(seconds: float) -> Answer:
    return Answer(seconds, TURN, [0], None)


BUSY = Answer(None, TURN, [0], None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which a test sets."""
    now_s = [0.0]
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now_s[0])
    return now_s


def tell(answer: Answer) -> Callable[[], Answer]:
    return lambda: answer


def test_all_answers_come_back_to_who_asked(clock: list[float]) -> None:
    store = dist.HashStore()
    first, second = (RollCalls(store, rank, 2) for rank in range(2))
    call = first.ask(since_s=0.0)
    first.look(tell(waits(30.0)))
    assert call.answers is None
    second.look(tell(BUSY))
    first.look(tell(waits(31.0)))
    assert call.answers == [waits(30.0), BUSY]


def test_a_silent_worker_leaves_the_call_open(clock: list[float]) -> None:
    store = dist.HashStore()
    calls = [RollCalls(store, rank, 3) for rank in range(3)]
    call = calls[0].ask(since_s=0.0)
    for _ in range(3):
        calls[0].look(tell(waits(1.0)))
        calls[2].look(tell(BUSY))
    assert call.answers is None


def test_an_answer_to_an_earlier_call_counts_for_no_later_one(clock: list[float]) -> None:
    store = dist.HashStore()
    first, second = (RollCalls(store, rank, 2) for rank in range(2))
    first.ask(since_s=0.0)
    first.look(tell(waits(1.0)))
    second.look(tell(BUSY))
    first.look(tell(waits(1.0)))
    call = first.ask(since_s=0.0)
    first.look(tell(waits(2.0)))
    assert call.answers is None
    second.look(tell(waits(0.5)))
    first.look(tell(waits(2.0)))
    assert call.answers == [waits(2.0), waits(0.5)]


class Interrupted:
    """A store that lets another thread run once a first call is found, as threads do."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.meanwhile = store, lambda: None

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        if found and "roll" in keys[0]:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_a_second_thread_that_looks_counts_no_call_twice(clock: list[float]) -> None:
    """The waiting thread looks too, at the end of a long wait."""
    store = dist.HashStore()
    interrupted = Interrupted(store)
    first, second = RollCalls(interrupted, 0, 2), RollCalls(store, 1, 2)
    second.ask(since_s=0.0)
    second.look(tell(waits(1.0)))
    interrupted.meanwhile = lambda: first.look(tell(BUSY))
    first.look(tell(BUSY))
    call = first.ask(since_s=0.0)
    for _ in range(2):
        first.look(tell(waits(1.0)))
        second.look(tell(BUSY))
    first.look(tell(waits(1.0)))
    assert call.answers == [waits(1.0), BUSY]


def test_workers_that_ask_together_share_a_call(clock: list[float]) -> None:
    store = dist.HashStore()
    first, second = (RollCalls(store, rank, 2) for rank in range(2))
    clock[0] = 9.9
    first.look(tell(BUSY))
    clock[0] = 10.0
    calls = first.ask(since_s=0.0), second.ask(since_s=0.0)
    second.look(tell(waits(1.0)))
    first.look(tell(waits(1.0)))
    second.look(tell(waits(1.0)))
    assert [call.number for call in calls] == [1, 1]
    assert all(call.answers is not None for call in calls)
    # The other may have asked, and somebody answered, as early as this worker's last look.
    assert [call.asked_s for call in calls] == [9.9, 10.0]


def test_a_question_of_an_earlier_wait_is_not_asked_again(clock: list[float]) -> None:
    calls = RollCalls(dist.HashStore(), 0, 2)
    early = calls.ask(since_s=0.0)
    assert calls.ask(since_s=0.0) is early
    clock[0] = 5.0
    assert calls.ask(since_s=4.0) is not early


class Wait:
    """A wait that began at 0, with a roll call that a test answers."""

    def __init__(self, clock: list[float], *, rank: int = 0) -> None:
        self.clock, self.calls = clock, list[RollCall]()
        self.patience = Patience(
            self._call_roll,
            start_s=0.0,
            limit_s=LIMIT_S,
            busy_limit_s=BUSY_S,
            rank=rank,
            call="step 3",
        )

    def _call_roll(self, *, since_s: float) -> RollCall:
        assert since_s == 0.0
        self.calls.append(RollCall(self.clock[0]))
        return self.calls[-1]

    def at(self, time_s: float, *answers: Answer) -> float:
        """Answer the open call; return the deadline."""
        self.clock[0] = time_s
        self.patience.find_deadline(0)
        if answers:
            self.calls[-1].answers = answers
        return self.patience.find_deadline(0)


def test_silence_ends_the_wait_at_the_limit(clock: list[float]) -> None:
    wait = Wait(clock)
    assert wait.at(29.0) == LIMIT_S and not wait.calls
    assert wait.at(30.0) == LIMIT_S and len(wait.calls) == 1
    assert wait.at(59.0) == LIMIT_S and len(wait.calls) == 1


def test_a_busy_worker_is_waited_for_up_to_the_busy_limit(clock: list[float]) -> None:
    wait, deadline_s = Wait(clock), LIMIT_S
    for now_s in range(30, 1800, 30):
        deadline_s = wait.at(now_s, waits(float(now_s)), BUSY)
        assert deadline_s == min(now_s + LIMIT_S, BUSY_S)
    assert deadline_s == BUSY_S


def test_a_worker_that_falls_silent_is_given_the_limit_from_its_last_answer(
    clock: list[float],
) -> None:
    wait = Wait(clock)
    assert wait.at(30.0, waits(30.0), BUSY) == 90.0
    assert wait.at(89.0) == 90.0


def test_where_all_wait_the_limit_counts_from_the_last_arrival(clock: list[float]) -> None:
    wait = Wait(clock)
    assert wait.at(30.0, waits(30.0), waits(30.0)) == LIMIT_S
    late = Wait(clock)
    assert late.at(30.0, waits(30.0), waits(2.0)) == 88.0


@pytest.mark.parametrize(
    "absent",
    [Answer(None, TURN, [], None), Answer(None, TURN, [0], "step() of another group")],
    ids=["freed the optimizer", "waits elsewhere"],
)
def test_a_worker_that_will_not_come_is_not_waited_for(clock: list[float], absent: Answer) -> None:
    assert find_busy([waits(1.0), absent], optimizer=0) is None
    assert Wait(clock).at(30.0, waits(30.0), BUSY, absent) == LIMIT_S


def test_the_first_worker_that_waits_says_so_once(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    answers = BUSY, waits(30.0), waits(30.0)
    with caplog.at_level(logging.INFO, logger="distlion"):
        first, second = Wait(clock, rank=1), Wait(clock, rank=2)
        for now_s in (30.0, 60.0, 90.0):
            assert bool(caplog.records) == (now_s > LIMIT_S), "told before it is late"
            first.at(now_s, *answers)
            second.at(now_s, *answers)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "[rank 1] step 3 has waited for more than 60 s for rank 0, "
    )
    assert "an error after 1800 s" in record.getMessage()


def test_roll_is_called_anew_in_a_store_that_has_come_back_empty() -> None:
    old, new = dist.HashStore(), dist.HashStore()
    first, second = (RollCalls(old, rank, 2) for rank in range(2))
    asked = first.ask(since_s=0.0)
    first.look(tell(BUSY))  # the other one has not seen it
    for each in (first, second):
        each._store = new
        each.begin_anew()
    for each in (first, second, first):
        each.look(tell(BUSY))
    assert asked.answers is not None and len(asked.answers) == 2

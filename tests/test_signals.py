"""Signals that wait for the end of what must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from distlion.signals import deferred_signals

NUMBER = signal.SIGUSR1


class Rung(Exception):
    """Raised by the handler of a test, with how often it has been called."""


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """Let a handler raise at every signal; the list has one item for each call."""
    made: list[int] = []

    def ring(number: int, frame: object) -> None:
        made.append(number)
        raise Rung(len(made))

    before = signal.signal(NUMBER, ring)
    yield made
    signal.signal(NUMBER, before)


def ring_within(n_signals: int, *, gives_way: bool = True) -> tuple[int, Rung | None]:
    """Return how many signals the block outlived, and what came out of it."""
    outlived = 0
    try:
        with deferred_signals("a test", gives_way=gives_way):
            for _ in range(n_signals):
                signal.raise_signal(NUMBER)
                outlived += 1
    except Rung as error:
        return outlived, error
    return outlived, None


def test_what_a_handler_raises_comes_at_the_end(calls: list[int]) -> None:
    outlived, error = ring_within(1)
    assert outlived == len(calls) == 1
    assert str(error) == "1"


def test_the_second_signal_cuts_the_block_short(calls: list[int]) -> None:
    outlived, error = ring_within(3)
    assert outlived == 1
    assert len(calls) == 2
    assert str(error) == "1"


def test_what_does_not_give_way_is_never_cut_short(calls: list[int]) -> None:
    outlived, error = ring_within(3, gives_way=False)
    assert outlived == len(calls) == 3
    assert str(error) == "1"


def test_a_handler_that_raises_nothing_runs_at_once() -> None:
    made: list[int] = []
    before = signal.signal(NUMBER, lambda number, frame: made.append(number))
    try:
        with deferred_signals("a test") as signals:
            signal.raise_signal(NUMBER)
            assert made == [NUMBER]
        assert signals.error is None
    finally:
        signal.signal(NUMBER, before)


def raise_within() -> None:
    with deferred_signals("a test"):
        signal.raise_signal(NUMBER)
        raise ValueError("of the block")


def test_a_signal_wins_over_an_error_of_the_block_which_it_names(calls: list[int]) -> None:
    own = signal.getsignal(NUMBER)
    with pytest.raises(Rung) as raised:
        raise_within()
    assert isinstance(raised.value.__context__, ValueError)
    assert signal.getsignal(NUMBER) is own


def test_a_handler_that_is_replaced_meanwhile_stays_so(calls: list[int]) -> None:
    with deferred_signals("a test"):
        signal.signal(NUMBER, signal.SIG_IGN)
    assert signal.getsignal(NUMBER) is signal.SIG_IGN


def nest(reached: list[str]) -> None:
    with deferred_signals("a test"):
        with deferred_signals("a part of it"):
            signal.raise_signal(NUMBER)
        reached.append("the rest")


def test_an_inner_block_leaves_it_to_the_outer_one(calls: list[int]) -> None:
    reached: list[str] = []
    with pytest.raises(Rung):
        nest(reached)
    assert reached == ["the rest"]


def test_other_threads_change_no_handler(calls: list[int]) -> None:
    own, seen = signal.getsignal(NUMBER), []

    def run() -> None:
        with deferred_signals("a test"):
            seen.append(signal.getsignal(NUMBER))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [own]

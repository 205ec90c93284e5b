"""The order in which exchanges take turns, which all ranks must agree on."""

from collections.abc import Callable

import pytest

from distlion.step.bucket import Pipeline, run_all
from distlion.wire.pattern import Exchanging


def exchange(log: list[str], name: str, rounds: int) -> Exchanging[str]:
    for number in range(rounds):
        log.append(f"{name} sends {number}")
        yield
        log.append(f"{name} waits {number}")
    return name


def make(log: list[str], *rounds: int) -> list[Callable[[], Exchanging[str]]]:
    return [
        lambda name=name, n=n: exchange(log, name, n)
        for name, n in zip("abcdefgh", rounds, strict=False)
    ]


def test_a_bucket_sends_before_earlier_ones_wait() -> None:
    log: list[str] = []
    assert run_all(start() for start in make(log, 2, 2, 2)) == ["a", "b", "c"]
    assert log == [
        "a sends 0",
        "b sends 0",
        "a waits 0",
        "a sends 1",
        "c sends 0",
        "a waits 1",
        "b waits 0",
        "b sends 1",
        "b waits 1",
        "c waits 0",
        "c sends 1",
        "c waits 1",
    ]


def test_results_come_in_the_order_of_the_exchanges_whichever_ends_first() -> None:
    log: list[str] = []
    assert run_all(start() for start in make(log, 3, 1, 0, 2)) == ["a", "b", "c", "d"]


def test_each_exchange_is_made_when_it_starts() -> None:
    log: list[str] = []
    made: list[int] = []

    def note(start: Callable[[], Exchanging[str]]) -> Exchanging[str]:
        made.append(len(log))
        return start()

    assert run_all(note(start) for start in make(log, 1, 1)) == ["a", "b"]
    assert made == [0, 1]


def test_nothing_to_run_has_no_results() -> None:
    assert run_all([]) == []


def test_an_error_reaches_whoever_adds_or_drains() -> None:
    def failing() -> Exchanging[str]:
        yield
        raise ValueError("lost")

    pipeline = Pipeline[str]()
    pipeline.add(failing())
    with pytest.raises(ValueError, match="lost"):
        pipeline.add(exchange([], "b", 1))
    pipeline = Pipeline[str]()
    pipeline.add(failing())
    with pytest.raises(ValueError, match="lost"):
        pipeline.drain()

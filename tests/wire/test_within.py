"""A limited wait for the store: its answer, its error, its end, and no thread to wait on."""

from __future__ import annotations

import threading

import pytest

from distlion.wire.watch import within


def test_an_answer_and_an_error_are_the_functions() -> None:
    def fail() -> int:
        raise RuntimeError("the store is gone")

    assert within(30, lambda: 7) == 7
    with pytest.raises(RuntimeError, match="the store is gone"):
        within(30, fail)


def test_what_takes_longer_has_no_answer() -> None:
    ended = threading.Event()
    assert within(0.01, ended.wait) is None
    ended.set()


def test_where_no_thread_can_start_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert within(30, lambda: 7) is None

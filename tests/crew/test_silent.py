"""A member that is stopped is given up soon; one that computes for long keeps its place."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_true,
    check_equal,
    collect_log,
    host_store,
    make_crew,
    start,
    stop_self,
    train,
    wake,
)
from distlion import faults
from distlion.crew import CrewLion
from distlion.crew.epoch import Epoch, Member, listen
from distlion.crew.lifeline import Pulse
from distlion.crew.store import Rendezvous, name_epoch
from distlion.wire import Exchange
from distlion.wire.heartbeats import BEAT_S

SILENCE_S = 2.0
LONG_S = 300.0
"""A limit that no test waits for."""
TIMEOUTS = distlion.Timeouts(step_s=LONG_S, busy_s=LONG_S, init_s=LONG_S)


def be_stopped(
    rank: int, size: int, port: int, point: faults.Point, exchange: Exchange
) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=SILENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]

    def each(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT and not faults.armed:
            faults.arm(
                rank=crew.rank,
                step=STRUCK_AT,
                point=point,
                action=lambda _: stop_self(store),
            )
        if rank == 1 and optimizer.committed_step == STRUCK_AT + 5 and crew.size < size:
            wake(store)
        if rank and optimizer.committed_step == GOAL - 2:
            # It is let in again before they finish.
            await_true(lambda: crew.size == size or crew.wants_change)

    options, said = {"exchange": exchange, "timeouts": TIMEOUTS}, collect_log()
    return {**train(crew, options, seed=rank, size=size, each=each), "said": said}


@pytest.mark.parametrize(
    ("point", "exchange"),
    [
        pytest.param("before_step", distlion.AllReduce(), marks=pytest.mark.slow),
        ("framed", distlion.AllReduce()),
        # The votes of the others wait for it, and are all that it needs.
        ("after_commit", distlion.AllGather()),
    ],
)
def test_member_that_is_stopped_is_given_up_and_let_in_again(
    point: faults.Point, exchange: Exchange
) -> None:
    store = host_store()
    stopped, *others = start(be_stopped, 3, store.port, point, exchange)
    check_given_up(stopped, others)


def check_given_up(silent: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Check that the others went on without one, and that it came back with its parameters."""
    check_equal([silent, *others])
    assert any("came while the others trained" in line for line in silent["said"])
    for result in others:
        left = [line for line in result["formed"] if "(silent)" in line]
        assert len(left) == 1, result["formed"]
        assert f"left: worker {silent['id']} (silent); came: nobody" in left[0]
        assert f"came: worker {silent['id']} (back)" in result["formed"][-1]
        assert len(result["epochs"][STRUCK_AT + 3][1]) == 2
        assert len(result["epochs"][GOAL][1]) == 3


def hold_the_lock(rank: int, size: int, port: int, path: str) -> dict[str, Any]:
    """One member is in a call that holds Python's lock until the others have gone on without it."""
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=SILENCE_S)
    pipe, held = os.open(path, os.O_RDWR), []

    def each(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if rank == 0 and step == STRUCK_AT and not held:
            # ``os.read`` would release the lock.
            held.append(ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1))
        if rank == 1 and step == STRUCK_AT + 5 and crew.size < size:
            os.write(pipe, b".")
        if rank and step == GOAL - 2:
            await_true(lambda: crew.size == size or crew.wants_change)

    options, said = {**OPTIONS["majority"], "timeouts": TIMEOUTS}, collect_log()
    return {**train(crew, options, seed=rank, size=size, each=each), "said": said, "held": held}


def test_member_whose_one_call_holds_pythons_lock_for_long_is_given_up_and_let_in_again(
    tmp_path: Path,
) -> None:
    store, pipe = host_store(), tmp_path / "pipe"
    os.mkfifo(pipe)
    holder, *others = start(hold_the_lock, 3, store.port, str(pipe))
    assert holder["held"] == [1]
    check_given_up(holder, others)


def come_and_be_stopped(rank: int, size: int, port: int) -> dict[str, Any]:
    """A newcomer is stopped while it takes parameters; the others wait for it in a broadcast."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == 2:
        store.get("begun")
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=SILENCE_S)
    if rank == 2:
        action = partial(stop_self, store)
        faults.arm(rank=crew.id, step=STRUCK_AT + 1, point="broadcast", action=lambda _: action())

    def each(optimizer: CrewLion) -> None:
        if rank == 2:
            return
        if optimizer.committed_step == STRUCK_AT:
            store.set("begun", "")
            await_true(lambda: store.check(["stopped"]) or crew.wants_change)
        if optimizer.committed_step == GOAL - 2:
            if rank == 1 and crew.size < size:
                wake(store)
            await_true(lambda: crew.size == size or crew.wants_change)

    options = {**OPTIONS["majority"], "timeouts": TIMEOUTS}
    return train(crew, options, seed=rank, size=2, each=each)


@pytest.mark.slow
def test_newcomer_that_is_stopped_is_given_up_and_let_in_again() -> None:
    store = host_store()
    *members, newcomer = start(come_and_be_stopped, 3, store.port)
    check_equal([*members, newcomer])
    for result in members:
        assert len(result["epochs"][STRUCK_AT + 5][1]) == 2
        assert len(result["epochs"][GOAL][1]) == 3
    assert min(newcomer["epochs"]) == GOAL


def compute_for_long(rank: int, size: int, port: int) -> dict[str, Any]:
    """One member computes for three times as long as one that is silent is waited for."""
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=1)

    def each(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            until_s = time.monotonic() + 3
            while time.monotonic() < until_s:
                sum(range(1000))

    options = {**OPTIONS["majority"], "timeouts": TIMEOUTS}
    return train(crew, options, seed=rank, size=size, each=each)


def test_member_that_computes_for_long_keeps_its_place() -> None:
    store = host_store()
    results = start(compute_for_long, 3, store.port)
    check_equal(results)
    for result in results:
        assert result["traffic"]["members_lost"] == 0
        assert result["epochs"][GOAL] == result["epochs"][STRUCK_AT]


def abandon(rank: int, size: int, port: int) -> dict[str, Any]:
    """On one worker the main thread ends, and another thread keeps the process."""
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=SILENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]

    def each(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            keeper = threading.Thread(target=lambda: store.wait(["given up"]), daemon=False)
            keeper.start()
            threading.main_thread().is_alive = lambda: False  # type: ignore[method-assign]
            keeper.join()
            os._exit(3)
        if rank and optimizer.committed_step == STRUCK_AT + 5:
            store.set("given up", "")

    options = {**OPTIONS["majority"], "timeouts": TIMEOUTS}
    return train(crew, options, seed=rank, size=size, each=each)


def test_process_whose_main_thread_has_ended_is_given_up() -> None:
    store = host_store()
    dead, *results = start(abandon, 3, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)
    for result in results:
        assert len(result["epochs"][GOAL][1]) == 2


def make_rendezvous(port: int) -> Rendezvous:
    return Rendezvous(f"127.0.0.1:{port}", run_id="run", secret="", min_workers=2, max_workers=9)


def make_epoch(rendezvous: Rendezvous, number: int) -> Epoch:
    members = tuple(Member(each, 3, 40, 17, "host", 100 + each) for each in range(2))
    return Epoch(number, members, 0, rendezvous.store.at(name_epoch(number)))


def test_heartbeats_count_in_their_epoch_only() -> None:
    store = host_store()
    ours, theirs = make_rendezvous(store.port), make_rendezvous(store.port)
    theirs.begin_beating(4, 1)
    heard, others = (listen(make_epoch(ours, number), silence_s=1) for number in (4, 5))
    await_true(lambda: others.find_silent() == (1,) or bool(time.sleep(BEAT_S)))
    assert heard.find_silent() == ()
    ours.end()
    theirs.end()


def test_heartbeats_end_as_a_worker_leaves_its_epoch() -> None:
    store = host_store()
    ours, theirs = make_rendezvous(store.port), make_rendezvous(store.port)
    theirs.begin_beating(4, 1)
    heard = listen(make_epoch(ours, 4), silence_s=1)
    theirs.pulse.rest()
    await_true(lambda: heard.find_silent() == (1,) or bool(time.sleep(BEAT_S)))
    ours.end()
    theirs.end()


def test_heartbeats_end_with_the_threads_that_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pulse, sent = dist.HashStore(), Pulse(), []  # type: ignore[attr-defined]
    monkeypatch.setattr("distlion.crew.lifeline.beat", lambda *args: sent.append(args[-1]))
    ended = threading.Event()

    def train_on() -> None:
        pulse.begin(store, 1)
        ended.wait()

    trainer = threading.Thread(target=train_on)
    trainer.start()
    await_true(lambda: pulse._place is not None)
    main = threading.main_thread()
    monkeypatch.setattr(main, "is_alive", lambda: False)
    pulse.send()  # a program may train on another thread, and leave its main one
    ended.set()
    trainer.join()
    pulse.send()
    monkeypatch.undo()
    assert sent == [1]

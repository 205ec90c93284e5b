"""A save in the background that fails, on a disk that is too slow, leaves the next calls whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import distlion
from checkpoint.runs import Worker
from cluster import run_workers
from distlion.checkpoint import undo
from distlion.errors import CheckpointError, StepError
from distlion.optim.base import VotingBase
from distlion.peers import ownership

pytestmark = pytest.mark.distributed

BEHIND, LAST = "distlion-checkpoint", 6
"""The thread of a save, and its last exchange with the others."""


def give_up(rank: int, world_size: int, folder: str, at: int) -> tuple[str, int, list[float]]:
    """Let rank 0 give the other up in the background; then train, save and load."""
    asked: list[float] = []
    ask = ownership.ask

    def ask_or_give_up(link: Any, said: bytes, *, step: int | None) -> list[bytes]:
        if threading.current_thread().name == BEHIND:
            asked.append(link.timeout_s)
            if rank == 0 and len(asked) == at:
                if at == LAST:  # the other rank has what it needs, and does not notice
                    ask(link, said, step=step)
                raise link.failure("silent", step, "the other disk is slow")
        return ask(link, said, step=step)

    ownership.ask = ask_or_give_up  # type: ignore[assignment]
    worker = Worker(rank)
    worker.train(0, 1)
    everything = worker.model, worker.optimizer, worker.scheduler
    try:
        pending = distlion.save_checkpoint(folder, *everything, async_=True)
        worker.train(1, 2)
        told = ""
        try:
            pending.wait()
        except StepError as error:
            told = str(error)
    finally:
        ownership.ask = ask
    worker.train(2, 3)
    worker.save(folder, async_=True)
    worker.save(folder)
    return told, worker.load(folder).step, asked


@pytest.mark.parametrize("at", [1, 4, LAST])
def test_after_a_timeout_in_the_background_steps_and_saves_go_on(tmp_path: Path, at: int) -> None:
    found = run_workers(give_up, 2, str(tmp_path), at)
    assert "the other disk is slow" in found[0][0]
    assert (found[1][0] == "") == (at == LAST)
    assert [step for _, step, _ in found] == [3, 3]
    limit_s = distlion.Timeouts().busy_s  # a disk may be slow for long
    assert found[0][2] == [limit_s] * at  # so the fault has fired
    assert not list(tmp_path.glob("partial-*"))


def count_behind(rank: int, world_size: int, folder: str) -> set[str]:
    """Save in the background; return the threads that looked at the count of steps."""
    threads, find = set(), VotingBase.committed_step.fget  # type: ignore[attr-defined]
    assert find is not None

    def look(optimizer: VotingBase) -> int:
        threads.add(threading.current_thread().name)
        step: int = find(optimizer)
        return step

    VotingBase.committed_step = property(look)  # type: ignore[assignment, method-assign]
    try:
        worker = Worker(rank)
        worker.train(0, 1)
        worker.save(folder, async_=True)
    finally:
        VotingBase.committed_step = property(find)  # type: ignore[assignment, method-assign]
    return threads


def test_a_save_in_the_background_does_not_touch_the_count_of_steps(tmp_path: Path) -> None:
    for threads in run_workers(count_behind, 2, str(tmp_path)):
        assert BEHIND not in threads and threads


def run_out_of_memory(rank: int, world_size: int, folder: str) -> tuple[str, bool]:
    """Load where one rank has no memory for copies; say whether it has what it had."""
    worker, keep = Worker(rank), undo._Copies
    worker.train(0, 1)
    worker.save(folder)
    worker.train(1, 2)
    expected = worker.tensors()

    def fail(kept: object) -> None:
        raise MemoryError("no room for a copy")

    if rank == 1:
        undo._Copies = fail  # type: ignore[assignment, misc]
    try:
        with pytest.raises(CheckpointError) as told:
            worker.load(folder)
    finally:
        undo._Copies = keep  # type: ignore[misc]
    is_equal = worker.equals(expected)
    worker.train(2, 3)
    worker.load(folder)
    return str(told.value), is_equal


def test_a_rank_without_memory_for_a_load_is_heard_by_all(tmp_path: Path) -> None:
    for said, is_equal in run_workers(run_out_of_memory, 2, str(tmp_path)):
        assert "no room for a copy" in said and "rank 1" in said
        assert is_equal

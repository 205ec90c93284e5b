"""Workers of tests/cluster.py that are used again: only those that left nothing behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distlion
from cluster import WorkersFailedError, run_workers
from distlion import faults
from distlion.wire import watch
from tiers import in_tiers

pytestmark = pytest.mark.distributed

CALLS: list[int] = []


def tell(rank: int, world_size: int) -> tuple[Any, ...]:
    """Return this process, how many ranks there are, and what the last call must not change."""
    found = len(CALLS), torch.rand(1).item(), os.getcwd(), torch.get_num_threads(), watch.SETTLE_S
    CALLS.append(rank)
    total = torch.ones(1)
    dist.all_reduce(total)
    torch.set_num_threads(2)
    watch.SETTLE_S += 1
    os.chdir("/")
    faults.arm(rank=0, step=0, point="before_step", action=print)
    return os.getpid(), int(total), *found, len(faults.armed)


def tell_process(rank: int, world_size: int) -> int:
    return os.getpid()


def replace_a_function() -> None:
    distlion.layout.count_words = max  # type: ignore[attr-defined]


def replace_a_method() -> None:
    distlion.Lion.step = max  # type: ignore[assignment, method-assign]


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True, name="distlion left").start()


def change_the_environment() -> None:
    os.environ["DISTLION_LEFT"] = "1"


def change_the_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def handle_logs() -> None:
    logging.getLogger("distlion.left").addHandler(logging.NullHandler())


LEFTOVERS: list[Callable[[], Any]] = [
    replace_a_function,
    replace_a_method,
    leave_a_thread,
    change_the_environment,
    change_the_dtype,
    handle_logs,
]


def leave(rank: int, world_size: int, number: int) -> int:
    if rank == 1:
        LEFTOVERS[number]()
    return os.getpid()


def fail(rank: int, world_size: int) -> None:
    assert rank == 0


def test_processes_are_used_again_as_if_they_were_new() -> None:
    first, again = run_workers(tell, 2), run_workers(tell, 2)
    assert {process for process, *_ in first} == {process for process, *_ in again}
    assert [told[1:] for told in first] == [told[1:] for told in again]
    assert [told[1:] for told in run_workers(tell, 3)] == [(3, *first[0][2:])] * 3


@pytest.mark.parametrize("number", in_tiers(range(len(LEFTOVERS)), lambda number: number < 2))
def test_a_process_that_leaves_something_behind_is_not_used_again(number: int) -> None:
    clean, left = run_workers(leave, 2, number)
    after = run_workers(tell_process, 2)
    assert clean in after
    assert left not in after


def test_after_a_failure_no_process_is_used_again() -> None:
    before = run_workers(tell_process, 2)
    with pytest.raises(WorkersFailedError, match="rank 0: ok"):
        run_workers(fail, 2)
    assert not set(before) & set(run_workers(tell_process, 2))


@pytest.mark.parametrize(
    "options",
    in_tiers(
        [{"fresh": True}, {"outcomes": True}, {"process_group": False}],
        lambda each: "fresh" in each,
    ),
)
def test_processes_to_which_something_may_happen_are_new_and_end(options: dict[str, bool]) -> None:
    before = run_workers(tell_process, 2)
    fresh = run_workers(tell_process, 2, **options)
    assert not set(before) & set(fresh)
    assert set(run_workers(tell_process, 2)) == set(before)


def use_a_mesh(rank: int, world_size: int, is_kept: bool) -> int:
    mesh = init_device_mesh("cpu", (world_size,))
    if is_kept:
        vars(sys)["mesh of a test"] = mesh
    whole = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert (whole + whole).sum().full_tensor() == 8
    return os.getpid()


def test_a_process_is_used_again_when_its_caches_have_forgotten_a_mesh() -> None:
    used = run_workers(use_a_mesh, 2, False)
    # Of ranks in the other order, in groups of the same names.
    assert set(run_workers(use_a_mesh, 2, False)) == set(used)


def test_a_process_that_still_has_a_mesh_is_not_used_again() -> None:
    used = run_workers(use_a_mesh, 2, True)
    assert not set(used) & set(run_workers(tell_process, 2))


def test_no_two_test_modules_have_one_name() -> None:
    """Pytest refuses the second one, and a worker would take the first one for it."""
    root = Path(__file__).parents[1]
    folders = [root / name for name in ("tests", "campaigns", "benchmarks/tests")]
    paths = [path for folder in folders for path in folder.rglob("test_*.py")]
    names = Counter(path.name for path in paths if not (path.parent / "__init__.py").exists())
    assert [name for name, times in names.items() if times > 1] == []

"""Optimizers on two process groups of the same ranks: swapped calls are told as such."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from cluster import run_workers
from distlion import errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    await_waits,
    caught,
    freeze_state,
    give_time,
    lose_patience,
    note_wait,
    params_of,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

ODD_RANK = 1
STEP_TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 40.0
TIMES = {
    "alike": (STEP_TIMEOUT_S, 0, STEP_TIMEOUT_S),
    "first sooner": (STEP_TIMEOUT_S, 0, 1.0),
    "first later": (LONG_TIMEOUT_S, ODD_RANK, 1.0),
}
"""Of the first group; and which rank comes last, with the time of its own."""


def make_groups(world_size: int) -> list[dist.ProcessGroup | None]:
    return [dist.new_group(list(range(world_size))) for _ in range(2)]


def make_pair(
    groups: Sequence[dist.ProcessGroup | None], *, first_timeout_s: float = STEP_TIMEOUT_S
) -> list[distlion.DistributedLion]:
    """Make an optimizer on each of two groups; the first gives up after a time of its own."""
    return [
        distlion.DistributedLion(
            [("weight", nn.Parameter(torch.full((70,), 0.5)))],
            lr=1e-2,
            process_group=group,
            exchange=distlion.AllReduce(),
            timeouts=distlion.Timeouts(step_s=timeout_s, busy_s=timeout_s),
        )
        for group, timeout_s in zip(groups, (first_timeout_s, STEP_TIMEOUT_S), strict=True)
    ]


def set_grads(pair: list[distlion.DistributedLion], rank: int) -> None:
    for optimizer in pair:
        for p in params_of(optimizer):
            p.grad = torch.full_like(p, float(rank + 1))


def swap(
    rank: int, world_size: int, first_timeout_s: float, last: int, patience_s: float
) -> tuple[Caught | None, bool, float]:
    """Take a step with each; then let rank 1 swap the two calls.

    One rank comes last, when all others wait, and gives up after a time of its own.
    """
    give_time()
    groups = make_groups(world_size)
    pair = make_pair(groups, first_timeout_s=first_timeout_s)
    set_grads(pair, rank)
    for optimizer in pair:
        optimizer.step()
    before = [freeze_state(optimizer) for optimizer in pair]
    first = pair[1] if rank == ODD_RANK else pair[0]
    if rank == last:
        await_waits([each for each in range(world_size) if each != last])
        lose_patience(first, after_s=patience_s)
    else:
        note_wait(rank, groups[rank == ODD_RANK])
    started_s = time.monotonic()
    found = caught(None, first.step)
    took_s = time.monotonic() - started_s
    dist.barrier()
    return found, [freeze_state(optimizer) for optimizer in pair] == before, took_s


@pytest.mark.parametrize("times", in_tiers(TIMES, lambda name: name != "alike"))
def test_swapped_steps_on_two_groups_are_one_error_that_names_both(times: str) -> None:
    outcomes = run_workers(swap, 3, *TIMES[times], timeout_s=90)
    assert_all_raised(
        [found for found, *_ in outcomes],
        errors.StepMismatchError,
        "step 1 of optimizer 0 of process group 1 on ranks 0, 2",
        "step 1 of optimizer 0 of process group 2 on rank 1",
    )
    assert len({found.text.split("]")[1] for found, *_ in outcomes if found}) == 1
    assert [found.culprits for found, *_ in outcomes if found] == [(ODD_RANK,)] * 3
    assert all(unchanged for _, unchanged, _ in outcomes)
    # The sooner of the two deadlines ends the wait on both groups.
    assert max(took_s for *_, took_s in outcomes) < LONG_TIMEOUT_S / 2


def come_late(rank: int, world_size: int) -> list[Any]:
    """Let a pair of groups fail; on another pair rank 1 never comes to the step."""
    failed = make_pair(make_groups(world_size))
    set_grads(failed, rank)
    first = caught(None, (failed[1] if rank == ODD_RANK else failed[0]).step)
    later = make_pair(make_groups(world_size))
    set_grads(later, rank)
    second = None if rank == ODD_RANK else caught(None, later[0].step)
    dist.barrier()
    return [first, second]


def test_a_group_that_failed_before_is_no_excuse_for_one_that_is_late() -> None:
    for rank, (first, second) in enumerate(run_workers(come_late, 2, timeout_s=90)):
        assert_raised(first, errors.StepMismatchError)
        if rank != ODD_RANK:
            assert_raised(second, errors.StepTimeoutError, "rank 1 runs, but did not come")

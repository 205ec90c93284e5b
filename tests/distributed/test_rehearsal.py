"""A step without its commit: it moves nothing, and raises as a step does."""

from __future__ import annotations

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from distlion_netlab.rehearsal import rehearse_step
from failures import Caught, assert_all_raised, caught, make_optimizer, set_grads

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def rehearse_well(rank: int, world_size: int) -> tuple[list[Caught | None], int, list[int], int]:
    """Rehearse, once with a gradient that is not finite, then step; what was raised and sent."""
    optimizer, found, sent = make_optimizer(), [], []
    for step in range(2):
        set_grads(optimizer, step, rank)
        if (rank, step) == (1, 1):
            optimizer.param_groups[0]["params"][0].grad[0] = torch.nan
        found.append(caught(optimizer, lambda: rehearse_step(optimizer)))
        sent.append(optimizer.traffic.last_sent_bytes)
    set_grads(optimizer, 2, rank)
    optimizer.step()
    return found, optimizer.committed_step, sent, optimizer.plan.sent_bytes


def test_a_rehearsal_sends_what_a_step_sends_and_lets_values_go_that_are_not_finite() -> None:
    for found, committed, sent, planned in run_workers(rehearse_well, 2):
        assert found == [None, None]
        assert committed == 1
        assert sent == [planned] * 2


def test_a_worker_that_is_alone_rehearses_nothing() -> None:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, 0)
    assert caught(optimizer, lambda: rehearse_step(optimizer)) is None
    assert optimizer.traffic.steps == 1


def rehearse_with_another_lr(rank: int, world_size: int) -> tuple[Caught | None, Caught | None]:
    optimizer: distlion.DistributedLion = make_optimizer()
    set_grads(optimizer, 0, rank)
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    found = caught(optimizer, lambda: rehearse_step(optimizer))
    return found, caught(optimizer, optimizer.step)


def test_a_rehearsal_raises_as_a_step_where_settings_differ() -> None:
    outcomes = run_workers(rehearse_with_another_lr, 2)
    assert_all_raised([found for found, _ in outcomes], errors.ConfigMismatchError, "lr")
    assert_all_raised([after for _, after in outcomes], errors.ProcessGroupError, "rehearse_step")

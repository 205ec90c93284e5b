"""A process group that is missing, gone, late or silent is told on every rank."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch.distributed as dist

from cluster import run_workers
from distlion import Timeouts, errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    await_waits,
    caught,
    give_time,
    make_optimizer,
    note_wait,
    set_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed


def destroy_then_step(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    dist.barrier()
    dist.destroy_process_group()
    return caught(optimizer, optimizer.step)


def test_step_after_destroying_the_group_is_an_error_on_every_rank() -> None:
    assert_all_raised(run_workers(destroy_then_step, 2), errors.ProcessGroupError, "destroyed")


def replace_then_step(rank: int, world_size: int, folder: str) -> Caught | None:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size
    )
    return caught(optimizer, optimizer.step)


@pytest.mark.slow
def test_step_after_replacing_the_group_is_an_error_on_every_rank(tmp_path: Any) -> None:
    outcomes = run_workers(replace_then_step, 2, str(tmp_path))
    assert_all_raised(outcomes, errors.ProcessGroupError, "destroyed|replaced|another")


def build_without_group(rank: int, world_size: int) -> Caught | None:
    return caught(None, make_optimizer)


@pytest.mark.parametrize("variable", in_tiers(["2", "16"], lambda n: n == "16"))
def test_world_size_without_a_group_is_an_error(variable: str) -> None:
    outcomes = run_workers(
        build_without_group, 2, process_group=False, environment={"WORLD_SIZE": variable}
    )
    assert_all_raised(
        outcomes, errors.ProcessGroupError, "WORLD_SIZE", variable, "init_process_group"
    )


def test_world_size_of_one_without_a_group_is_one_worker() -> None:
    assert run_workers(
        build_without_group, 1, process_group=False, environment={"WORLD_SIZE": "1"}
    ) == [None]


def join_late(rank: int, world_size: int, folder: str) -> Caught | None:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    optimizer.step()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/late", rank=rank, world_size=world_size
    )
    return caught(optimizer, optimizer.step)


@pytest.mark.slow
def test_group_that_appears_after_construction_is_an_error_on_every_rank(tmp_path: Any) -> None:
    outcomes = run_workers(join_late, 2, str(tmp_path), process_group=False)
    assert_all_raised(outcomes, errors.ProcessGroupError, "init_process_group|process group")


def build_outside_of_group(rank: int, world_size: int) -> Caught | None:
    group = dist.new_group([0, 1])
    found = caught(None, lambda: make_optimizer(process_group=group))
    dist.barrier()
    return found


def test_rank_outside_of_the_given_group_is_an_error_there() -> None:
    outcomes = run_workers(build_outside_of_group, 3)
    assert outcomes[:2] == [None, None]
    assert_raised(outcomes[2], errors.ProcessGroupError, "member", "process_group")


def lose_a_peer(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer(timeouts=Timeouts(step_s=10, busy_s=20))
    set_grads(optimizer, 0, rank)
    optimizer.step()
    if rank == 1:
        # Only this rank's sockets close; the others are inside their step by then or come to it.
        dist.destroy_process_group()
        del optimizer
        gc.collect()  # sockets close with the last reference, which a cycle may keep
        return None
    set_grads(optimizer, 1, rank)
    return caught(optimizer, optimizer.step)


def test_rank_that_leaves_the_group_is_lost_to_every_other() -> None:
    outcomes = run_workers(lose_a_peer, 3)
    for rank in (0, 2):
        assert assert_raised(outcomes[rank], errors.PeerLostError).unchanged


def step_after_a_lost_peer(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer(timeouts=Timeouts(step_s=10, busy_s=20))
    if rank == 1:
        dist.destroy_process_group()
        del optimizer
        gc.collect()
        return None
    set_grads(optimizer, 0, rank)
    with contextlib.suppress(errors.PeerLostError):
        optimizer.step()
    return caught(optimizer, optimizer.step)


@pytest.mark.slow
def test_group_is_dead_after_a_peer_was_lost() -> None:
    outcomes = run_workers(step_after_a_lost_peer, 3)
    for rank in (0, 2):
        assert assert_raised(outcomes[rank], errors.ProcessGroupError, "step 0|dead").unchanged


def miss_construction(rank: int, world_size: int) -> Caught | None:
    if rank == 1:
        return None
    give_time()
    if rank == 2:
        note_wait(rank)
        return caught(None, make_optimizer)
    await_waits([2])
    return caught(None, lambda: make_optimizer(timeouts=Timeouts(init_s=1, step_s=20, busy_s=20)))


def test_rank_that_builds_no_optimizer_ends_the_others_at_the_init_timeout() -> None:
    outcomes = run_workers(miss_construction, 3, timeout_s=30)
    for rank in (0, 2):
        assert_raised(outcomes[rank], errors.StepTimeoutError, "Timeouts.init_s")

"""Whether an optimizer can go on: alive after what all raise, torn after a commit cut short."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from distlion.step.bucket import Bucket
from failures import caught, make_optimizer, make_params, params_of, set_grads


def cut_commit_short(rank: int, world_size: int) -> tuple[str, str, str]:
    """Interrupt the commit of the second of two buckets; what state_dict() and step() raise."""
    optimizer = make_optimizer(bucket_elements=1)
    set_grads(optimizer, 0, rank)
    commit, committed = Bucket.commit, []

    def interrupted(bucket: Bucket, *rest: Any) -> None:
        committed.append(bucket)
        if len(committed) == 2:
            raise KeyboardInterrupt
        commit(bucket, *rest)

    Bucket.commit = interrupted  # type: ignore[method-assign,assignment]
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    after = optimizer.param_groups[0]["params"]
    moved = [not torch.equal(before[index], param) for index, param in enumerate(after)]
    assert moved == [True, False]
    saved, stepped = caught(None, optimizer.state_dict), caught(None, optimizer.step)
    assert saved is not None
    assert stepped is not None
    return saved.kind, saved.text, stepped.kind


@pytest.mark.distributed
def test_a_commit_cut_short_leaves_nothing_to_save_and_nothing_to_go_on_with() -> None:
    for kind, text, stepped in run_workers(cut_commit_short, 2):
        assert kind == errors.CheckpointError.__name__
        assert "between two steps" in text
        assert stepped == errors.ProcessGroupError.__name__


@pytest.mark.parametrize("is_recoverable", [True, False])
def test_an_error_says_whether_training_may_go_on(is_recoverable: bool) -> None:
    error = errors.NonFiniteError("a", rank=1, step=2, is_recoverable=is_recoverable)
    assert error.is_recoverable is is_recoverable
    assert not errors.PeerLostError("a").is_recoverable


def let_go(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """Forget an optimizer with overlap: whether it, a momentum and a hook are still there."""
    params = make_params()
    optimizer = make_optimizer(params, overlap=True, bucket_elements=64)
    momentum = weakref.ref(optimizer.state[params[0][1]]["exp_avg"])
    alive = weakref.ref(optimizer)
    gc.disable()  # nothing may wait for it
    del optimizer
    hooks = any(param._post_accumulate_grad_hooks for _, param in params)
    return alive() is not None, momentum() is not None, hooks


@pytest.mark.distributed
def test_an_optimizer_that_nobody_wants_leaves_nothing_behind() -> None:
    assert run_workers(let_go, 2) == [(False, False, False)] * 2


kept: list[distlion.DistributedLion] = []


def let_go_amid_backward(rank: int, world_size: int) -> int:
    """Rank 0 lets go of an optimizer whose first votes have left; rank 1 never sends its own."""
    optimizer = make_optimizer(overlap=True, bucket_elements=64)
    if rank == 1:
        kept.append(optimizer)
        return 0
    sum(param.sum() for param in params_of(optimizer)).backward()  # type: ignore[union-attr]
    overlap = optimizer._session.overlap
    assert overlap is not None
    overlap._submit(lambda: None).result()  # what was started before has left
    started = overlap._n_started
    del optimizer, overlap
    gc.collect()  # a cycle may keep the last reference
    return started


@pytest.mark.distributed
def test_an_optimizer_let_go_amid_backward_waits_for_nobody() -> None:
    assert run_workers(let_go_amid_backward, 2, timeout_s=20) == [1, 0]


def die_between_backwards(rank: int, world_size: int) -> tuple[int, int]:
    """Run backward and zero_grad on an optimizer whose peer is gone; what has arrived."""
    optimizer = make_optimizer(
        overlap=True, bucket_elements=64, timeouts=distlion.Timeouts(step_s=3, busy_s=20)
    )
    set_grads(optimizer, 0, rank)
    with pytest.raises(RuntimeError), optimizer._session.lifecycle.collective("something"):
        raise RuntimeError
    overlap = optimizer._session.overlap
    assert overlap is not None
    params = params_of(optimizer)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    arrived = len(overlap._arrivals)
    optimizer.zero_grad()
    return arrived, overlap._n_started


@pytest.mark.distributed
def test_no_vote_leaves_a_dead_optimizer_during_backward() -> None:
    assert run_workers(die_between_backwards, 2) == [(0, 0)] * 2


def add_a_group(rank: int, world_size: int) -> list[int]:
    params = make_params()
    optimizer = make_optimizer(params, overlap=True, bucket_elements=64)
    optimizer.add_param_group({"params": [("added", torch.nn.Parameter(torch.zeros(5)))]})
    return [len(param._post_accumulate_grad_hooks) for _, param in params]


@pytest.mark.distributed
def test_a_parameter_has_one_hook_however_often_buckets_are_laid_out() -> None:
    assert run_workers(add_a_group, 2) == [[1, 1]] * 2


def freeze_and_unfreeze(rank: int, world_size: int) -> list[int]:
    """Lay out while a parameter is frozen, and run backward when it isn't any more."""
    params = make_params()
    optimizer = make_optimizer(params, overlap=True, bucket_elements=64)
    params[0][1].requires_grad_(False)
    optimizer.add_param_group({"params": [("added", torch.nn.Parameter(torch.zeros(5)))]})
    params[0][1].requires_grad_(True)
    sum(param.sum() for param in params_of(optimizer)).backward()  # type: ignore[union-attr]
    return [int(param.grad is not None) for _, param in params]


@pytest.mark.distributed
def test_backward_goes_through_a_parameter_that_was_frozen_for_a_while() -> None:
    assert run_workers(freeze_and_unfreeze, 2) == [[1, 1]] * 2

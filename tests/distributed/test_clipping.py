"""Clipping inside the optimizer: the norms, the factor, and the same bits as clipped gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

import distlion
import oracle
from cluster import run_workers
from distlion import errors
from failures import Caught, assert_all_raised, caught, params_of
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    make_optimizer,
    set_grads,
    snapshot,
)
from replay import worker_grads as raw_grads
from tiers import in_tiers

pytestmark = pytest.mark.distributed

GROUPS = (
    GroupSpec(distlion.MajorityVote(), (1, 65, 9001), lr=2e-3, weight_decay=0.1),
    GroupSpec(distlion.Average(), (700, 3), lr=1e-3),
)
CASE = Case("clipped", GROUPS, steps=4, seed=17, absent=True)
MAX_NORM = 2.0
SCOPES = ("worker", "global")
Grads = list[oracle.F32 | None]


def squared_norm(grads: Grads) -> float:
    """Add exactly; the optimizer adds blocks of 4,096 in double first."""
    return math.fsum(float(x) ** 2 for grad in grads if grad is not None for x in grad)


def clip_by_hand(grads: Grads, square: float) -> Grads:
    """Scale as the kernels do: by a factor that is rounded to float32 once."""
    factor = np.float32(min(1.0, MAX_NORM / (math.sqrt(square) + 1e-6)))
    return [None if grad is None else grad * factor for grad in grads]


def play(rank: int, world_size: int, scope: str, by_hand: bool) -> tuple[Outcome, list[float]]:
    clip = None if by_hand else distlion.ClipNorm(MAX_NORM, scope=scope)  # type: ignore[arg-type]
    optimizer = make_optimizer(CASE, rank=rank, clip_norm=clip)
    factors = []
    for step in range(CASE.steps):
        everybody = [raw_grads(CASE, step, worker) for worker in range(world_size)]
        grads = everybody[rank]
        squares = [squared_norm(each) for each in everybody]
        square = squares[rank] if scope == "worker" else sum(squares) / world_size
        factors.append(MAX_NORM / math.sqrt(square))
        set_grads(optimizer, clip_by_hand(grads, square) if by_hand else grads)
        before = [None if p.grad is None else p.grad.clone() for p in params_of(optimizer)]
        assert (optimizer.grad_norm is None) == (by_hand or step == 0)
        optimizer.step()
        if not by_hand:
            check_norm(optimizer, grads, square, scope)
        for p, grad in zip(params_of(optimizer), before, strict=True):
            assert (grad is None) == (p.grad is None)
            assert grad is None or torch.equal(grad, p.grad), "the gradient was changed"
    return snapshot(optimizer), factors


def check_norm(
    optimizer: distlion.DistributedLion, grads: Grads, square: float, scope: str
) -> None:
    """Compare with the exact norm, and a worker's own with what torch would have returned."""
    assert optimizer.grad_norm == pytest.approx(math.sqrt(square), rel=1e-12)
    if scope == "worker":
        params = [torch.nn.Parameter(torch.zeros(len(grad))) for grad in grads if grad is not None]
        for param, grad in zip(params, [grad for grad in grads if grad is not None], strict=True):
            param.grad = torch.from_numpy(grad.copy())
        theirs = torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        # Torch adds in float32.
        assert optimizer.grad_norm == pytest.approx(theirs.item(), rel=1e-5)


def play_both(rank: int, world_size: int) -> dict[tuple[str, bool], tuple[Outcome, list[float]]]:
    return {
        (scope, by_hand): play(rank, world_size, scope, by_hand)
        for scope in SCOPES
        for by_hand in (True, False)
    }


@functools.cache
def outcomes_of(world_size: int) -> list[dict[tuple[str, bool], tuple[Outcome, list[float]]]]:
    return run_workers(play_both, world_size)


@pytest.mark.parametrize("world_size", in_tiers([1, 2, 3], lambda n: n == 3))
@pytest.mark.parametrize("scope", SCOPES)
def test_clipping_equals_gradients_that_were_scaled_before(scope: str, world_size: int) -> None:
    for rank, outcomes in enumerate(outcomes_of(world_size)):
        found, factors = outcomes[scope, False]
        expected, _ = outcomes[scope, True]
        assert min(factors) < 0.9, "nothing was clipped"
        assert_equal_to_the_bit(found, expected, f"rank {rank}")


def make_pair(rank: int, **options: Any) -> distlion.DistributedLion:
    params = [torch.nn.Parameter(torch.full((n,), 0.5)) for n in (5000, 9000)]
    return distlion.DistributedLion(
        params, lr=1e-2, timeouts=distlion.Timeouts(step_s=20), **options
    )


def play_nodes(rank: int, world_size: int, scope: str, size: int) -> list[np.ndarray]:
    """Play with nodes, or (size 1) with single workers that hold the nodes' means."""
    nodes = distlion.Nodes(ranks_per_node=size) if size > 1 else None
    clip = distlion.ClipNorm(MAX_NORM, scope=scope)  # type: ignore[arg-type]
    optimizer = make_pair(rank, nodes=nodes, clip_norm=clip)
    for step in range(3):
        for index, p in enumerate(params_of(optimizer)):
            ranks = [rank] if size > 1 else [2 * rank, 2 * rank + 1]
            total = torch.zeros(p.numel())
            for worker in ranks:
                total += torch.from_numpy(oracle.gradient(5, step, worker, index, p.numel()))
            p.grad = total / len(ranks)
        optimizer.step()
    return [p.detach().numpy() for p in params_of(optimizer)]


@pytest.mark.parametrize("scope", in_tiers(SCOPES, lambda scope: scope == "global"))
def test_norm_of_a_node_is_that_of_its_mean_gradient(scope: str) -> None:
    flat = run_workers(play_nodes, 2, scope, 1)
    for params in run_workers(play_nodes, 4, scope, 2):
        assert all(np.array_equal(a, b) for a, b in zip(params, flat[0], strict=True))


def clip_nan(rank: int, world_size: int, nonfinite: str) -> tuple[Caught | None, int]:
    optimizer = make_pair(
        rank, nonfinite=nonfinite, clip_norm=distlion.ClipNorm(1.0, scope="global")
    )
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    if rank == 1:
        params_of(optimizer)[0].grad[7] = float("inf")
    found = caught(optimizer, optimizer.step)
    optimizer.verify_replicas()
    return found, optimizer.committed_step


def keep_norms(rank: int, world_size: int, scope: str) -> list[float | None]:
    """List the norm after a step, then after steps that are refused, raised or skipped."""
    norms = []
    for nonfinite in ("raise", "skip"):
        clip = distlion.ClipNorm(1.0, scope=scope)  # type: ignore[arg-type]
        optimizer = make_pair(rank, nonfinite=nonfinite, clip_norm=clip)
        for step in range(2):
            for p in params_of(optimizer):
                p.grad = torch.full_like(p, 1.0 + step)
            if step == 1 and rank == world_size - 1:
                params_of(optimizer)[0].grad[7] = float("inf")
            caught(optimizer, optimizer.step)
            assert optimizer.committed_step == 1
            norms.append(optimizer.grad_norm)
    return norms


@pytest.mark.parametrize(("world_size", "scope"), [(1, "worker"), (2, "worker"), (2, "global")])
def test_a_refused_step_leaves_the_norm_of_the_last_commit(world_size: int, scope: str) -> None:
    norm = pytest.approx(math.sqrt(14000), rel=1e-12)
    assert run_workers(keep_norms, world_size, scope) == [[norm] * 4] * world_size


def test_norm_that_is_not_finite_is_left_to_the_policy() -> None:
    raised = run_workers(clip_nan, 3, "raise")
    assert_all_raised([found for found, _ in raised], errors.NonFiniteError, "rank 1")
    assert run_workers(clip_nan, 3, "abstain") == [(None, 1)] * 3


def disagree(rank: int, world_size: int) -> Caught | None:
    optimizer = make_pair(rank, clip_norm=distlion.ClipNorm(1.0, scope="global"))
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    action = optimizer.verify_replicas if rank == 1 else optimizer.step
    return caught(optimizer, action)


def test_call_out_of_turn_is_an_error_on_every_rank_with_global_norms_too() -> None:
    assert_all_raised(run_workers(disagree, 3), errors.ConfigMismatchError, "verify_replicas")


def count(rank: int, world_size: int) -> tuple[Any, Any]:
    optimizer = make_pair(rank, clip_norm=distlion.ClipNorm(1.0, scope="global"))
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    plan, traffic = optimizer.plan, optimizer.traffic
    return (plan.sent_bytes, plan.messages), (traffic.sent_bytes, traffic.messages)


def test_plan_holds_the_exchange_of_norms() -> None:
    for plan, counted in run_workers(count, 3):
        assert plan == counted


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), float("inf")])
def test_norms_out_of_range_are_refused(max_norm: float) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="max_norm"):
        distlion.ClipNorm(max_norm)


def test_arguments_of_a_wrong_kind_are_refused() -> None:
    with pytest.raises(errors.UnsupportedTypeError, match="max_norm"):
        distlion.ClipNorm("1")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="scope"):
        distlion.ClipNorm(1.0, scope="node")  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedTypeError, match="clip_norm"):
        distlion.DistributedLion([torch.nn.Parameter(torch.ones(1))], clip_norm=1.0)  # type: ignore[arg-type]

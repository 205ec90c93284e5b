"""With full-precision directions, workers follow Lion on the mean gradient, sign for sign.

The direction is linear in momentum and gradient, so the mean of the workers' directions is the
direction of one Lion that is fed the mean gradient (arXiv:2302.06675), although no momentum was
ever exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import distlion
import oracle
from cluster import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

N_COORDINATES = 2003
STEPS = 200
BETAS = (0.9, 0.99)

# fp32 rounds each momentum by at most 2^-24 of itself in each step, and such errors live for about
# 1 / (1 - beta2) = 100 steps, most of them cancelling; the direction adds three roundings and the
# sum of N directions N - 1 more. 2^-18 of the magnitudes that went in is 64 ulps: what lies below
# it may round to either sign, what lies above may not.
UNDECIDED = 2.0**-18
LARGEST_UNDECIDED_FRACTION = 0.002

DYADIC_BETAS = (0.5, 0.75)
DYADIC_STEPS = 8


@dataclass(frozen=True)
class Trace:
    """What one worker saw, (steps, n) each: the sign of the movement, the momentum before it."""

    moved: np.ndarray
    exp_avg: np.ndarray


def noisy_gradient(step: int, rank: int) -> oracle.F32:
    """Different data on each rank: a slowly turning common part, and noise of changing size."""
    common = oracle.values(1, step // 20, n=N_COORDINATES) * np.float32(0.25)
    return common + oracle.values(2, step, rank, n=N_COORDINATES)


def dyadic_gradient(step: int, rank: int) -> oracle.F32:
    """Integers from -7 to 7; at first coordinates 0, then some where ranks 0 and 1 cancel."""
    grad = np.trunc(oracle.values(3, step, rank, n=N_COORDINATES) * np.float32(16)).clip(-7, 7)
    opposed = np.trunc(oracle.values(3, step, 99, n=N_COORDINATES) * np.float32(16)).clip(-7, 7)
    grad[:100] = 0
    grad[100:300] = {0: opposed, 1: -opposed}.get(rank, 0 * opposed)[100:300]
    return grad


def follow(
    rank: int, world_size: int, gradient_name: str, steps: int, betas: tuple[float, float]
) -> Trace:
    gradient = globals()[gradient_name]
    p = torch.nn.Parameter(torch.zeros(N_COORDINATES))
    optimizer = distlion.DistributedLion(
        [p],
        lr=2.0**-10,
        betas=betas,
        weight_decay=0.0,
        aggregation=distlion.FullPrecision(),
        replicas=distlion.Replicas(check_every=None),
    )
    moved, exp_avg = [], []
    for step in range(steps):
        exp_avg.append(optimizer.state[p]["exp_avg"].numpy().copy())
        before = p.detach().clone()
        p.grad = torch.from_numpy(gradient(step, rank))
        optimizer.step()
        # x' = x - lr * S with lr a power of two: exact, so the movement shows S.
        moved.append(torch.sign(before - p.detach()).to(torch.int8).numpy())
    return Trace(np.stack(moved), np.stack(exp_avg))


@pytest.mark.parametrize("world_size", range(1, 6))
def test_full_precision_follows_float64_lion_on_the_mean_gradient(world_size: int) -> None:
    traces = run_workers(follow, world_size, "noisy_gradient", STEPS, BETAS, measured=False)
    lion = oracle.Lion64(*BETAS, np.zeros(N_COORDINATES))
    undecided = 0
    for step in range(STEPS):
        grad = np.mean(
            [noisy_gradient(step, r).astype(np.float64) for r in range(world_size)], axis=0
        )
        direction = lion.direction(grad)
        magnitude = np.mean(
            [np.abs(trace.exp_avg[step].astype(np.float64)) for trace in traces], axis=0
        )
        bound = UNDECIDED * (np.abs(lion.exp_avg) + np.abs(grad) + magnitude)
        decided = np.abs(direction) > bound
        for trace in traces:
            assert np.array_equal(trace.moved[step][decided], np.sign(direction[decided])), (
                f"step {step}"
            )
        # A coordinate whose gradients were all exactly 0 so far is no close call: it must not move.
        still = (np.abs(direction) + bound) == 0
        assert all((trace.moved[step][still] == 0).all() for trace in traces), f"step {step}"
        undecided += np.count_nonzero(~decided & ~still)
        lion.move_momentum(grad)
    assert undecided < LARGEST_UNDECIDED_FRACTION * STEPS * N_COORDINATES


@pytest.mark.parametrize("world_size", range(1, 6))
def test_full_precision_follows_lion_exactly_where_no_operation_rounds(world_size: int) -> None:
    traces = run_workers(
        follow, world_size, "dyadic_gradient", DYADIC_STEPS, DYADIC_BETAS, measured=False
    )
    # The sum of the gradients in place of their mean: N times the direction, which has the same
    # sign, and no division.
    lion = oracle.Lion64(*DYADIC_BETAS, np.zeros(N_COORDINATES))
    momenta = [np.zeros(N_COORDINATES)] * world_size
    for step in range(DYADIC_STEPS):
        grads = [dyadic_gradient(step, r).astype(np.float64) for r in range(world_size)]
        assert_no_operation_rounds(momenta, grads)
        direction = lion.direction(np.sum(grads, axis=0))
        for rank, trace in enumerate(traces):
            assert np.array_equal(trace.exp_avg[step], momenta[rank]), f"step {step}, rank {rank}"
            assert np.array_equal(trace.moved[step], np.sign(direction)), (
                f"step {step}, rank {rank}"
            )
        lion.move_momentum(np.sum(grads, axis=0))
        momenta = [0.75 * m + 0.25 * g for m, g in zip(momenta, grads, strict=True)]
    exact_zeros = np.count_nonzero(direction == 0)
    assert 0 < exact_zeros < N_COORDINATES, (
        "the exact form should meet directions of exactly 0, and others"
    )


def assert_no_operation_rounds(momenta: list[oracle.F64], grads: list[oracle.F64]) -> None:
    """Assert that float32 holds every intermediate; float64 computes them exactly."""
    total = np.zeros(N_COORDINATES)
    for m, g in zip(momenta, grads, strict=True):
        total = total + (0.5 * m + 0.5 * g)
        for exact in (
            0.5 * m,
            0.5 * g,
            0.5 * m + 0.5 * g,
            0.75 * m,
            0.25 * g,
            0.75 * m + 0.25 * g,
            total,
        ):
            assert np.array_equal(exact, exact.astype(np.float32).astype(np.float64))

"""Gradients and bytes that change under way are noticed before anything is committed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import matrix
from cluster import run_workers
from distlion import errors, faults
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    caught,
    make_optimizer,
    params_of,
    set_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed


def double_grad(optimizer: Any) -> None:
    params_of(optimizer)[1].grad.mul_(2)


def replace_grad(optimizer: Any) -> None:
    p = params_of(optimizer)[1]
    p.grad = p.grad * 2


def drop_grad(optimizer: Any) -> None:
    params_of(optimizer)[1].grad = None


CHANGES = {"in place": double_grad, "another tensor": replace_grad, "dropped": drop_grad}


def change_gradient(
    rank: int, world_size: int, point: Any, change: str
) -> tuple[Caught | None, int, int]:
    optimizer = make_optimizer()
    fault = faults.arm(rank=1, step=1, point=point, action=CHANGES[change])
    found = None
    for step in range(2):
        set_grads(optimizer, step, rank)
        found = caught(optimizer, optimizer.step)
    return found, fault.fired, optimizer.committed_step


@pytest.mark.parametrize("change", in_tiers(CHANGES, lambda name: name == "dropped"))
def test_gradient_changed_after_encoding_is_an_error_on_every_rank(change: str) -> None:
    outcomes = run_workers(change_gradient, 3, "after_encode", change)
    assert [fired for _, fired, _ in outcomes] == [0, 1, 0]
    assert_all_raised([found for found, _, _ in outcomes], errors.GradientChangedError, r"\b1\b")
    assert_raised(outcomes[1][0], errors.GradientChangedError, "second")


@pytest.mark.parametrize("change", in_tiers(CHANGES, lambda name: name == "in place"))
def test_gradient_changed_before_committing_is_an_error_on_that_rank(change: str) -> None:
    """The others commit: ranks may end one step apart, never inside of a step."""
    outcomes = run_workers(change_gradient, 3, "before_commit", change)
    assert [fired for _, fired, _ in outcomes] == [0, 1, 0]
    assert assert_raised(outcomes[1][0], errors.GradientChangedError, "second").unchanged
    assert [committed for _, _, committed in outcomes] == [2, 1, 2]


class Interrupted(Exception):
    """Raised by an armed fault."""


def interrupt(optimizer: Any) -> None:
    raise Interrupted


def interrupt_step(rank: int, world_size: int, point: Any) -> tuple[Caught | None, int]:
    """Every rank is interrupted: none waits for another."""
    optimizer = make_optimizer()
    fault = faults.arm(rank=rank, step=1, point=point, action=interrupt)
    set_grads(optimizer, 0, rank)
    optimizer.step()
    set_grads(optimizer, 1, rank)
    return caught(optimizer, optimizer.step), fault.fired


@pytest.mark.parametrize(
    "point", in_tiers(["before_step", "after_encode", "before_commit"], "before_commit".__eq__)
)
def test_exception_inside_of_a_step_leaves_the_worker_as_before(point: str) -> None:
    for outcome, fired in run_workers(interrupt_step, 2, point):
        assert fired == 1
        assert assert_raised(outcome, Interrupted).unchanged


def flip_last_bit(chunk: torch.Tensor) -> None:
    chunk[-1] ^= 1


def flip_magic(chunk: torch.Tensor) -> None:
    chunk[0] ^= 1


FLIPS = {"payload": flip_last_bit, "magic": flip_magic}


def corrupt(rank: int, world_size: int, exchange: Any, flip: str) -> tuple[Caught | None, int]:
    optimizer = make_optimizer(exchange=exchange)
    fault = faults.arm(rank=1, step=1, point="framed", action=FLIPS[flip])
    found = None
    for step in range(2):
        set_grads(optimizer, step, rank)
        found = caught(optimizer, optimizer.step)
    return found, fault.fired


# Each pattern and each flip once.
QUICK_FLIPS = {("all-reduce", "magic"), *((name, "payload") for name in matrix.PATTERNS)}


@pytest.mark.parametrize(
    ("pattern", "flip"),
    in_tiers(itertools.product(matrix.PATTERNS, FLIPS), QUICK_FLIPS.__contains__),
)
def test_flipped_bit_on_the_wire_is_an_error_on_every_rank(pattern: str, flip: str) -> None:
    outcomes = run_workers(corrupt, 3, matrix.PATTERNS[pattern], flip)
    assert outcomes[1][1] >= 1, "the fault did not fire"
    assert_all_raised([found for found, _ in outcomes], errors.CorruptFrameError, r"\b1\b")

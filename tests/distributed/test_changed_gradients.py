"""Edits of a gradient after its vote has left: one error on all ranks, and nothing is committed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distlion
import oracle
from cluster import run_workers
from distlion.errors import GradientChangedError, NonFiniteError
from failures import Caught, assert_raised, caught, params_of

pytestmark = pytest.mark.distributed

EDITOR = 1


def make_overlapped() -> distlion.DistributedLion:
    """Make an optimizer of parameters that are contiguous or not, of two dtypes, and one number."""
    values = {
        "plain": torch.ones(300),
        "channels last": torch.ones(8, 16, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.ones(200, dtype=torch.bfloat16),
        "number": torch.ones(()),
    }
    params = [(name, nn.Parameter(value)) for name, value in values.items()]
    settings: dict[str, Any] = {
        "overlap": True,
        "bucket_elements": 256,
        "timeouts": distlion.Timeouts(step_s=20),
    }
    return distlion.DistributedLion(params, lr=1e-2, **settings)


def backward(optimizer: distlion.DistributedLion, step: int, rank: int) -> list[nn.Parameter]:
    optimizer.zero_grad()
    params = params_of(optimizer)
    for index, p in enumerate(params):
        grad = torch.from_numpy(oracle.gradient(3, step, rank, index, p.numel()))
        (p * grad.to(p.dtype).view(p.shape)).sum().backward()
    return params


def halve(grad: torch.Tensor) -> None:
    with torch.no_grad():
        grad.mul_(0.5)


def halve_data(grad: torch.Tensor) -> None:
    grad.data.mul_(0.5)


def replace_gradient(param: nn.Parameter) -> None:
    param.grad = param.grad.clone()


def swap_memory(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data.clone()


def write_through_numpy(param: nn.Parameter) -> None:
    param.grad.numpy()[...] *= 0.5


def halve_together(params: list[nn.Parameter]) -> None:
    torch._foreach_mul_([p.grad.data for p in params], 0.5)


PLAIN, CHANNELS_LAST, HALF, NUMBER = range(4)
EDITS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "mul_ of data": lambda params: halve_data(params[PLAIN].grad),
    "mul_ of data, not contiguous": lambda params: halve_data(params[CHANNELS_LAST].grad),
    "mul_ of data, bfloat16": lambda params: halve_data(params[HALF].grad),
    "mul_ of data, one element": lambda params: halve_data(params[NUMBER].grad),
    "numpy": lambda params: write_through_numpy(params[PLAIN]),
    "foreach over data": halve_together,
    "inside no_grad": lambda params: halve(params[PLAIN].grad),
    "foreach clipping": lambda params: nn.utils.clip_grad_norm_(params, 1e-3, foreach=True),
    "another tensor": lambda params: replace_gradient(params[PLAIN]),
    "other memory": lambda params: swap_memory(params[PLAIN]),
    "no tensor": lambda params: setattr(params[PLAIN], "grad", None),
}


def edit_each(rank: int, world_size: int) -> tuple[dict[str, Caught | None], int]:
    optimizer, found = make_overlapped(), {}
    for step, (name, edit) in enumerate(EDITS.items()):
        params = backward(optimizer, step, rank)
        if rank == EDITOR:
            edit(params)
        found[name] = caught(optimizer, optimizer.step)
    backward(optimizer, 0, rank)
    optimizer.step()
    optimizer.verify_replicas()
    return found, optimizer.committed_step


@functools.cache
def edited() -> list[tuple[dict[str, Caught | None], int]]:
    return run_workers(edit_each, 2)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_gradient_after_backward_ends_the_step_on_all_ranks(name: str) -> None:
    for found, _ in edited():
        raised = assert_raised(found[name], GradientChangedError, f"rank {EDITOR}")
        assert raised.unchanged
        assert raised.culprits == (EDITOR,)


def test_training_goes_on_after_edits() -> None:
    assert [committed for _, committed in edited()] == [1, 1]


def write_nan(rank: int, world_size: int) -> list[Caught | None]:
    """Take a step with a NaN in a gradient, which is unequal to itself."""
    optimizer = make_overlapped()
    params = params_of(optimizer)
    (params[PLAIN] * (float("nan") if rank == EDITOR else 1.0)).sum().backward()
    return [caught(optimizer, optimizer.step)]


def test_a_nan_that_arrives_is_no_edit() -> None:
    for (found,) in run_workers(write_nan, 2):
        assert_raised(found, NonFiniteError, "plain")

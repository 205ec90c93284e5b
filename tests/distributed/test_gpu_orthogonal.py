"""Orthogonalized directions on a GPU: batches of one shape, in bfloat16, without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import distlion
from backends import INTERPRETS
from cluster import run_workers
from distlion.kernels import orthogonalize
from drawn import draw_grads

pytestmark = [
    pytest.mark.skipif(not INTERPRETS, reason="runs where TRITON_INTERPRET=1"),
    pytest.mark.slow,
]

SHAPES = ((6, 10), (4, 30), (6, 10), (6, 5, 2), (10, 6))
BATCHES = ((0, 2, 3), (1,), (4,))
LR = 1e-2


def step_once(rank: int, world_size: int) -> tuple[list[Tensor], list[str]]:
    """Do two steps; return what the first moved, and the waits of the second."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        params = [nn.Parameter(device.place(torch.zeros(shape))) for shape in SHAPES]
        groups = [{"params": params, "orthogonalize": True}]
        optimizer = distlion.DistributedLion(groups, lr=LR, exchange=distlion.AllReduce())
        moved: list[Tensor] = []
        for step in range(2):
            for param, grad in zip(params, draw_grads(params, 0, step), strict=True):
                param.grad = device.place(grad)
            device.forget()
            optimizer.step()
            waits = list(device.waits)
            moved = moved or [param.detach().cpu().clone() for param in params]
        return [each.as_subclass(Tensor) for each in moved], waits


def test_matrices_of_one_shape_share_batched_products_in_bfloat16() -> None:
    grads = draw_grads([torch.zeros(shape) for shape in SHAPES], 0, 0)
    expected = [torch.empty(0)] * len(SHAPES)
    for batch in BATCHES:
        # The first direction of both workers: 0.1 g.
        c = [0.1 * grads[index].view(len(grads[index]), -1) for index in batch]
        directions = orthogonalize(torch.stack(c).bfloat16())
        for index, direction in zip(batch, directions, strict=True):
            expected[index] = -LR * direction.float().sign().view(SHAPES[index])
    for moved, waits in run_workers(step_once, 2):
        for found, wanted in zip(moved, expected, strict=True):
            assert torch.equal(found, wanted)
        assert waits == ["event"]

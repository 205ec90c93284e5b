"""Workers with a GPU beside workers without one: the same bits, and one wait for each bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from backends import INTERPRETS
from cluster import run_workers
from tiers import in_tiers

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="runs where TRITON_INTERPRET=1")

SIZES = (70, 4200, 1, 513)
N_STEPS = 20


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def train(
    rank: int,
    world_size: int,
    params: list[nn.Parameter],
    place: Any,
    settings: dict[str, Any],
    n_steps: int,
) -> distlion.DistributedLion:
    dtype = params[0].dtype
    optimizer = distlion.DistributedLion(params, lr=1e-2, weight_decay=0.1, **settings)
    for step in range(n_steps):
        grads = [place(grad) for grad in draw(100 * step + rank, dtype)]
        sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify_replicas()
    return optimizer


def train_somewhere(
    rank: int,
    world_size: int,
    on_gpu: tuple[int, ...],
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and momenta after some steps, on a GPU for the ranks ``on_gpu``."""
    values = draw(7 + rank, dtype)
    if rank not in on_gpu:
        params = [nn.Parameter(value) for value in values]
        optimizer = train(rank, world_size, params, lambda grad: grad, settings, N_STEPS)
        return [p.detach() for p in params], [optimizer.state[p]["exp_avg"] for p in params]
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        params = [nn.Parameter(device.place(value)) for value in values]
        optimizer = train(rank, world_size, params, device.place, settings, N_STEPS)
        assert device.launches, "nothing was computed on the device"
        assert all(param.device.type == "cuda" for param in params)
        return [p.detach().cpu() for p in params], [
            optimizer.state[p]["exp_avg"].cpu() for p in params
        ]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    "rule", in_tiers(matrix.LISTED.values(), lambda rule: rule == distlion.MajorityVote())
)
def test_ranks_with_and_without_a_gpu_train_together(rule: Any, overlap: bool) -> None:
    settings = {"aggregation": rule, "overlap": overlap}
    if overlap:
        settings["bucket_elements"] = 600
    mixed, host = (
        run_workers(
            train_somewhere,
            3,
            on_gpu,
            settings,
            torch.float32,
            timeout_s=300,
        )
        for on_gpu in ((0, 2), ())
    )
    for ours, theirs in zip(mixed, host, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one, other))

"""A model of orthogonalized matrices and cautious biases, sharded, and the same one whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import distlion

ShardModel = Callable[..., nn.Module]


class Net(nn.Module):
    """Wide, tall and square matrices, and a convolution: no number of shards divides all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.hidden = nn.ModuleList([nn.Linear(20, 13), nn.Linear(13, 13), nn.Linear(13, 21)])
        self.last = nn.Linear(21, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x)


def build(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def shard(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    for module in (model.conv, *model.hidden, model.last):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].ndim > 1], "orthogonalize": True},
        {"params": [pair for pair in named if pair[1].ndim == 1], "cautious": True},
    ]


def make_optimizer(model: nn.Module, mesh: DeviceMesh, **options: Any) -> distlion.DistributedLion:
    settings = {
        "process_group": mesh["replicate"].get_group(),
        "lr": 1e-2,
        "weight_decay": 0.1,
        "seed": 7,
        "replicas": distlion.Replicas(check_every=1),
        "timeouts": distlion.Timeouts(step_s=20),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distlion.DistributedLion(make_groups(model), **{**settings, **options})


def run_backward(model: nn.Module, step: int, rank: int) -> None:
    torch.manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 2, 4, 4, dtype=dtype)).float().square().mean().backward()


class Whole:
    """The same training with whole parameters, by virtual workers in this process."""

    def __init__(self, workers: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = build(dtype)
        settings = {"lr": 1e-2, "weight_decay": 0.1, "seed": 7, **options}
        self.cluster = distlion.VirtualCluster(make_groups(self.model), workers=workers, **settings)

    def step(self, rows: list[list[Tensor | None]]) -> None:
        for worker, row in enumerate(rows):
            for param, grad in zip(self.model.parameters(), row, strict=True):
                param.grad = None if grad is None else grad.clone()
            self.cluster.collect(worker)
        self.cluster.step()

    def find_different(self, model: nn.Module) -> list[str]:
        """Name the parameters that do not have the same bits."""
        pairs = zip(model.named_parameters(), self.model.parameters(), strict=True)
        return [
            name
            for (name, mine), own in pairs
            if not torch.equal(getattr(mine, "full_tensor", lambda mine=mine: mine)(), own)
        ]

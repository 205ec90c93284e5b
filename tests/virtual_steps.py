"""Make a virtual cluster and step it, with gradients that tell workers and steps apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distlion import VirtualCluster

SIZES = {"a": 70, "b": 130}


def make_params() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in SIZES.items()
    }


def set_grads(params: dict[str, nn.Parameter], worker: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * worker + step)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator)


def do_step(cluster: VirtualCluster, params: dict[str, nn.Parameter], step: int) -> None:
    for worker in range(cluster.workers):
        set_grads(params, worker, step)
        cluster.collect(worker)
    cluster.step()


def make_cluster(workers: int = 3, **arguments: Any) -> tuple[VirtualCluster, dict[str, Any]]:
    params = make_params()
    return VirtualCluster(params.items(), lr=1e-2, workers=workers, **arguments), params

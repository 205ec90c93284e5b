"""Make a virtual cluster and step it, with gradients that tell workers and steps apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from distlion import VirtualCluster
from drawn import make_params, set_grads

SIZES = {"a": 70, "b": 130}


def do_step(cluster: VirtualCluster, params: dict[str, nn.Parameter], step: int) -> None:
    for worker in range(cluster.workers):
        set_grads(params.values(), worker, step)
        cluster.collect(worker)
    cluster.step()


def make_cluster(workers: int = 3, **arguments: Any) -> tuple[VirtualCluster, dict[str, Any]]:
    params = make_params(SIZES)
    return VirtualCluster(params.items(), lr=1e-2, workers=workers, **arguments), params

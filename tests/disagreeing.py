"""Workers of a cluster of which some hand in the negative of their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import distlion

SIZE, LR, BETA1, BETA2 = 200, 0.01, 0.9, 0.99
"""Below 256 elements, a parameter is its own sample."""

Flips = Callable[[int, int], bool]


def make_cluster(workers: int, **options: Any) -> tuple[distlion.VirtualCluster, Tensor]:
    param = nn.Parameter(torch.zeros(SIZE))
    arguments: dict[str, Any] = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "aggregation": distlion.TernaryVote(),
        "agreement": distlion.Agreement(every=1, on_disagreement="exclude"),
        **options,
    }
    return distlion.VirtualCluster([("w", param)], workers=workers, **arguments), param


class Grads:
    """Gradients of workers around a common one; some workers hand in the negative."""

    def __init__(self, workers: int, flips: Flips = lambda worker, step: False) -> None:
        self._workers, self._flips = workers, flips
        self._generator = torch.Generator().manual_seed(workers)
        self._step = 0

    def draw(self) -> list[Tensor]:
        common = 2 * torch.randn(SIZE, generator=self._generator)
        grads = [
            (common + torch.randn(SIZE, generator=self._generator))
            * (-1 if self._flips(worker, self._step) else 1)
            for worker in range(self._workers)
        ]
        self._step += 1
        return grads


def step(cluster: distlion.VirtualCluster, param: Tensor, grads: list[Tensor]) -> None:
    for worker, grad in enumerate(grads):
        param.grad = grad.clone()
        cluster.collect(worker)
    cluster.step()


def flip_last_of_three(worker: int, step: int) -> bool:
    return worker == 2


def flip_last(worker: int, step: int) -> bool:
    return worker == 3

"""An emulated accelerator: each pass of a layer takes a stated time, in which the host sleeps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from distlion_lab.tasks.base import seeded_generator
from distlion_netlab.workload import DeviceWorkload

_DEVIATION = 0.02


class EmulatedModel(nn.Module):
    """A chain of matrices that takes an accelerator's time but computes nothing.

    Args:
        workload: Sizes and times.
        seed: Seed of the weights, equal on all workers.
        rank: Number of this worker; gradients differ between workers.
    """

    def __init__(self, workload: DeviceWorkload, *, seed: int, rank: int) -> None:
        super().__init__()
        width, layers = workload.width, workload.layers
        draw = seeded_generator(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(
                _DEVIATION
                * torch.randn(width, width, generator=draw, dtype=torch.float32, device="cpu")
            )
            for _ in range(layers)
        )
        # Layers share one row of numbers; each starts at another place.
        self._drawn = torch.randn(
            width * width + layers,
            generator=seeded_generator(seed, rank),
            dtype=torch.float32,
            device="cpu",
        )
        self._forward_s = workload.step_s / (3 * layers)

    def forward(self) -> Tensor:
        """Sleep for the time of all forward passes, and return a loss."""
        passed = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        for number, weight in enumerate(self.weights):
            gradient = self._drawn[number : number + weight.numel()].view_as(weight)
            passed = _Layer.apply(  # type: ignore[no-untyped-call]
                passed, weight, gradient, self._forward_s
            )
        return passed


class _Layer(torch.autograd.Function):
    """Pass a number on; the weight's gradient is given."""

    @staticmethod
    def forward(
        ctx: Any, passed: Tensor, weight: Tensor, gradient: Tensor, forward_s: float
    ) -> Tensor:
        ctx.gradient, ctx.backward_s = gradient, 2 * forward_s
        time.sleep(forward_s)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, ctx.gradient.clone(), None, None

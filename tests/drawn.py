"""Parameters and gradients from seeded normals: every process that draws them has the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def draw(shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a tensor whatever torch's default dtype and device are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def make_params(
    shapes: Mapping[str, int | tuple[int, ...]], *, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    """Return a new parameter for each name, with the same values in every call."""
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(draw(shape, generator).to(dtype)) for name, shape in shapes.items()}


def draw_grads(params: Iterable[Tensor], worker: int, step: int) -> list[Tensor]:
    """Return a gradient for each parameter, its own for each worker and each step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [draw(param.shape, generator).to(param.dtype) for param in params]


def set_grads(params: Iterable[Tensor], worker: int, step: int) -> None:
    """Draw the gradients of a worker's step, and leave them where an optimizer reads them."""
    params = list(params)
    for param, grad in zip(params, draw_grads(params, worker, step), strict=True):
        param.grad = grad

"""What the rows of docs/reference/conformance.md share: a small model, and a loop over it.

A row is a function of a rank, run by two workers at once; its title is that of the page. They stand
in schedule_rows.py, step_rows.py and state_rows.py, and run in distributed/test_torch_optim.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import distlion

LR = 1e-2

Row = Callable[[int], None]


def row(rows: dict[str, Row], title: str) -> Callable[[Row], Row]:
    """Let a function be the row with this title."""

    def add(function: Row) -> Row:
        rows[title] = function
        return function

    return add


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def make_lion(model: nn.Module, **options: Any) -> distlion.DistributedLion:
    return distlion.DistributedLion(
        model.parameters(), **({"lr": LR, "timeouts": distlion.Timeouts(step_s=20)} | options)
    )


def make_batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(make_batch(step, rank)).square().mean()
    return loss


def train(
    model: nn.Module, optimizer: Optimizer, rank: int, *, first: int = 0, steps: int = 3
) -> None:
    for step in range(first, first + steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def trained_plainly(rank: int, steps: int = 3, **options: Any) -> list[Tensor]:
    """Parameters after a plain loop: what the rows that change nothing must come to."""
    model = make_model()
    train(model, make_lion(model, **options), rank, steps=steps)
    return bits_of(model)

"""Votes that are committed a step late, so that their exchange could hide behind a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

DELAYED = "delayed-"
"""In front of a method's name: each step is committed after the next backward pass."""


class _Method(Protocol):
    optimizer: torch.optim.Optimizer
    up_bits_per_parameter: float
    down_bits_per_parameter: float

    def collect(self, worker: int) -> None: ...

    def step(self) -> None: ...


class Delayed:
    """A method whose gradients are taken before the last step is committed.

    Equation:
        g_t = gradient at x_(t-1), g_0 at x_0;  x_(t+1), m_(t+1) = step(x_t, m_t, g_t)

    Step t + 1 begins its backward pass while the votes of step t travel, and commits them before it
    votes. So all but the last commit are in the momenta that a vote reads. After the last step the
    model holds all commits.

    Args:
        method: The method.
        params: The model's parameters. Between steps they lack the last commit.
        steps: Number of steps of the run.
    """

    def __init__(self, method: _Method, params: Sequence[nn.Parameter], steps: int) -> None:
        self._method, self._params = method, params
        self._newest = _copy(params)
        self._left = steps

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._method.optimizer

    @property
    def up_bits_per_parameter(self) -> float:
        return self._method.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self._method.down_bits_per_parameter

    def collect(self, worker: int) -> None:
        self._method.collect(worker)

    @torch.no_grad()
    def step(self) -> None:
        before = self._newest
        _write(self._params, before)
        self._method.step()
        self._newest = _copy(self._params)
        self._left -= 1
        if self._left:
            _write(self._params, before)


def _copy(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def _write(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)

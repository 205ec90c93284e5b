"""Parameters as kernels see them: contiguous, with momentum, place and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distlion.kernels import Coefficients, Segment
from distlion.layout import Slot


def write_back(param: Tensor, written: Tensor) -> None:
    """Copy what was written into a parameter that is not contiguous."""
    if not param.is_contiguous():
        param.detach().copy_(written)


def make_segment(
    param: Tensor,
    state: Mapping[Tensor, Mapping[str, Any]],
    slot: Slot,
    coefficients: Coefficients,
    *,
    abstain: bool = False,
) -> Segment:
    """Put together what the ops need of one parameter; ``abstain`` leaves its gradient out."""
    grad = None if abstain or param.grad is None else param.grad.contiguous()
    # A contiguous tensor is its own contiguous copy.
    return Segment(slot, param.contiguous(), grad, state[param]["exp_avg"], coefficients)

"""Parameters as kernels see them: flat, with their momentum, place and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distlion.kernels import Coefficients, Segment
from distlion.layout import Slot


def flatten(tensor: Tensor) -> Tensor:
    """View a tensor as (n,) contiguous in the logical order of coordinates; copy where need be."""
    return tensor.detach().contiguous().view(-1)


def write_back(param: Tensor, flat: Tensor) -> None:
    """Copy ``flat`` into a parameter that could not be viewed as flat."""
    if not param.is_contiguous():
        param.detach().copy_(flat.view(param.shape))


def make_segment(
    param: Tensor,
    state: Mapping[Tensor, Mapping[str, Any]],
    slot: Slot,
    coefficients: Coefficients,
    *,
    abstain: bool = False,
) -> Segment:
    """Put together what the ops need of one parameter; ``abstain`` leaves its gradient out."""
    grad = None if param.grad is None or abstain else flatten(param.grad)
    exp_avg = state[param]["exp_avg"].view(-1)
    return Segment(slot, flatten(param), grad, exp_avg, coefficients)

"""A warning where a learning rate is too small to move 16-bit parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distlion.errors import LostUpdatesWarning
from distlion.step.gradients import warn_user
from distlion.step.param import local_tensor

SAMPLED_ELEMENTS = 1 << 16


def warn_of_lost_updates(groups: Sequence[Mapping[str, Any]], *, rounding: str) -> None:
    """Warn once where most updates of a param group would be rounded away.

    An update of about lr is lost where it is below half the spacing of the numbers around a weight.
    The test uses the median weight of the group's parameters of one dtype.

    Args:
        groups: Param groups.
        rounding: "stochastic" loses nothing.
    """
    if rounding == "stochastic":
        return
    for number, group in enumerate(groups):
        lr = float(group["lr"])
        for dtype in (torch.bfloat16, torch.float16):
            params = [p for p in group["params"] if p.requires_grad and p.dtype == dtype]
            median = _find_median(params)
            if median == 0 or not 0 < lr < (spacing := _find_spacing(median, dtype)) / 2:
                continue
            name = str(dtype).removeprefix("torch.")
            remedy = "rounding='stochastic' or " if dtype == torch.bfloat16 else ""
            warn_user(
                f"lr={lr:g} of group {number} moves few of its {name} parameters: half of their "
                f"weights are at least {median:.3g}, where {name} numbers are {spacing:.3g} apart, "
                f"and less than half of that is rounded away; use {remedy}float32 parameters",
                LostUpdatesWarning,
            )
            return


def _find_median(params: Sequence[Tensor]) -> float:
    """Find the median of the magnitudes of a sample of all elements; 0 for none."""
    shards = [local_tensor(param).detach() for param in params]
    every = 1 + sum(shard.numel() for shard in shards) // SAMPLED_ELEMENTS
    samples = [shard.reshape(-1)[::every].float().abs().cpu() for shard in shards]
    if not any(sample.numel() for sample in samples):
        return 0.0
    median = float(torch.cat(samples).median())
    return median if math.isfinite(median) else 0.0


def _find_spacing(value: float, dtype: torch.dtype) -> float:
    """Find the spacing of a dtype from ``value``, above 0, to the next larger number."""
    info = torch.finfo(dtype)
    return float(2.0 ** math.floor(math.log2(max(value, info.smallest_normal))) * info.eps)

"""The precision of momenta and of updates, and a warning where updates are lost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, LostUpdatesWarning
from distlion.kernels.contract import EXP_AVG_DTYPES
from distlion.step.arguments import check_choice
from distlion.step.gradients import warn_user
from distlion.step.param import local_tensor

SAMPLED_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Precision:
    """Choose the dtype of momenta, and the rounding of parameters to theirs.

    Equation:
        nearest     x <- the nearest number of x's dtype, to even on a tie
        stochastic  x <- one of the two nearest, with probabilities by which the mean is x

    Args:
        exp_avg: torch.float32 or torch.bfloat16; None: as parameters, or float32 for float16.
        rounding: "nearest", or "stochastic" for bfloat16 parameters, which otherwise lose small
            updates. All workers draw the same bits.

    Raises:
        InvalidArgumentError: A value is not one of these.
    """

    exp_avg: torch.dtype | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.exp_avg is not None and self.exp_avg not in EXP_AVG_DTYPES:
            raise InvalidArgumentError(
                f"Precision.exp_avg={self.exp_avg!r}: expected torch.float32, torch.bfloat16, or "
                "None"
            )
        check_choice("Precision.rounding", self.rounding, ("nearest", "stochastic"))

    @property
    def is_stochastic(self) -> bool:
        """True if parameters are rounded at random."""
        return self.rounding == "stochastic"

    def check_suits(self, dtypes: Collection[torch.dtype]) -> None:
        """Check that stochastic rounding has parameters to round.

        Raises:
            InvalidArgumentError: No parameter is bfloat16.
        """
        if self.is_stochastic and torch.bfloat16 not in dtypes:
            raise InvalidArgumentError(
                "Precision.rounding='stochastic' rounds bfloat16 parameters, and there is none; "
                "use 'nearest'"
            )

    def check_rounds(self, dtypes: Collection[torch.dtype]) -> None:
        """Check that stochastic rounding can round parameters of these dtypes.

        Raises:
            InvalidArgumentError: One is float16.
        """
        if self.is_stochastic and torch.float16 in dtypes:
            raise InvalidArgumentError(
                "Precision.rounding='stochastic' cannot round float16 parameters; use 'nearest' or "
                "bfloat16"
            )


def warn_of_lost_updates(groups: Sequence[Mapping[str, Any]], precision: Precision) -> None:
    """Warn once where most updates of a param group would be rounded away.

    An update of about lr is lost where it is below half the spacing of the numbers around a weight.
    The test uses the median weight of the group's parameters of one dtype.

    Args:
        groups: Param groups.
        precision: The precision of updates; stochastic rounding loses nothing.
    """
    if precision.is_stochastic:
        return
    for number, group in enumerate(groups):
        lr = float(group["lr"])
        for dtype in (torch.bfloat16, torch.float16):
            params = [p for p in group["params"] if p.requires_grad and p.dtype == dtype]
            median = _find_median(params)
            if median == 0 or not 0 < lr < (spacing := _find_spacing(median, dtype)) / 2:
                continue
            name = str(dtype).removeprefix("torch.")
            remedy = "Precision(rounding='stochastic') or " if dtype == torch.bfloat16 else ""
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

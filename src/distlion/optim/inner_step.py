"""The step of an optimizer inside another one, also under a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


def do_inner_step(outside: Optimizer, inner: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Do a step of ``inner``, or none where a GradScaler has seen an overflow.

    A GradScaler sets ``grad_scale``, the factor in the gradients, and ``found_inf`` on an optimizer
    that has ``_step_supports_amp_scaling``. Other workers may have seen no overflow, so the outer
    optimizer must be called all the same.

    Args:
        outside: The optimizer that the scaler knows.
        inner: The optimizer that takes the step.
        closure: The step's closure.

    Returns:
        The result of its ``step``; None where there was no step.
    """
    scale: Tensor | None = getattr(outside, "grad_scale", None)
    found_inf: Tensor | float | None = getattr(outside, "found_inf", None)
    if found_inf is not None and float(found_inf) > 0:
        return None
    if scale is not None and not getattr(inner, "_step_supports_amp_scaling", False):
        _unscale(inner, scale)
        scale = None
    try:
        if scale is not None:
            inner.grad_scale = scale  # type: ignore[attr-defined]
            inner.found_inf = found_inf  # type: ignore[attr-defined]
        with torch.enable_grad():  # torch's optimizers turn it off themselves
            return inner.step() if closure is None else inner.step(closure)
    finally:
        for name in ("grad_scale", "found_inf"):
            if scale is not None:
                inner.__dict__.pop(name, None)


def _unscale(inner: Optimizer, scale: Tensor) -> None:
    """Divide gradients by a GradScaler's factor, as its ``unscale_`` does."""
    factor = scale.double().reciprocal().float()
    for group in inner.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))

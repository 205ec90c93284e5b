"""The step of an optimizer inside another one, also under a GradScaler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

_CREATES_STATE = "_init_optim_state"
"""Function of torch.distributed.checkpoint.state_dict; its name is tested with torch 2.13."""


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


def is_creating_state(inner: Optimizer) -> bool:
    """Return whether torch's checkpoint functions take this step, to create the inner state.

    They do if the state is empty: with gradients of 0 at a rate of 0, once in each save of an
    optimizer without state.
    """
    if inner.state or any(float(group.get("lr", 0)) for group in inner.param_groups):
        return False
    # A first step of a warmup can have the same rate and gradients, so only the caller tells.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != _CREATES_STATE:
        frame = frame.f_back
    return frame is not None


def _unscale(inner: Optimizer, scale: Tensor) -> None:
    """Divide gradients by a GradScaler's factor, as its ``unscale_`` does."""
    factor = scale.double().reciprocal().float()
    for group in inner.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))

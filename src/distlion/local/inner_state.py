"""The inner optimizer of local steps: its step, and its state where that is broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import Optimizer

from distlion.errors import CopiedParametersWarning, InnerStateResetWarning
from distlion.local.inner_optimizers import InnerOptimizers
from distlion.optim.arguments import label_params
from distlion.step.gradients import warn_user
from distlion.step.outcome import find_scaler
from distlion.step.param import is_dtensor, local_tensor

_NEAR = 0.05
"""Distance of state from parameters, relative to their norm, below which it is a copy of them."""


@torch.no_grad()
def find_broken(inner: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Find the parameters of which some inner state is not finite, in order.

    Every later step of such a parameter is lost: most optimizers make it NaN, and ``Lion`` leaves
    elements of it where they are.
    """
    rows = [(param, each) for param in params for each in _list_floats(inner.state.get(param, {}))]
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, each in rows:
        # NaN and infinity go through a sum; a sum that overflows is looked at again below.
        by_device.setdefault(each.device, []).append(each.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums).isfinite().all()) for sums in by_device.values()):
        return []
    return list(dict.fromkeys(param for param, each in rows if not each.isfinite().all()))


@torch.no_grad()
def reset_broken(
    inner: Optimizer, broken: Sequence[Tensor], *, made_early: Collection[Tensor], worker: int
) -> None:
    """Let the inner state of parameters begin anew, and warn.

    Not every state begins with 0, such as the step sizes of Rprop. So it is dropped, and the inner
    optimizer makes it in its next step. Two kinds are set to 0 instead: state that this optimizer
    may make at construction alone, and that of shards, which all ranks of a worker save together.

    Args:
        inner: The optimizer whose state it is.
        broken: Parameters at the common point whose state is not finite, as from ``find_broken``.
        made_early: Parameters that had state before the first step, as from ``list_made``.
        worker: This worker's rank.
    """
    for param in broken:
        if param in made_early or is_dtensor(param):
            _set_to_zero(inner.state[param])
        else:
            del inner.state[param]
    if broken:
        names = label_params(inner.param_groups)
        warn_user(_describe([names[param] for param in broken], worker), InnerStateResetWarning)


@torch.no_grad()
def warn_of_copies(inner: Optimizer, params: Sequence[Tensor]) -> None:
    """Warn if the inner state holds copies of the parameters, which votes would not move.

    Args:
        inner: The optimizer whose state it is.
        params: The parameters at the common point, after a vote.
    """
    for each in _list_parts(inner):
        # torch's own have none, and momenta of toy problems may equal parameters.
        if type(each).__module__.split(".")[0] not in ("torch", "distlion"):
            copies = _find_copies(each, [param for param in params if param in each.state])
            if copies:
                warn_user(_describe_copies(type(each).__name__, copies), CopiedParametersWarning)


def _list_parts(inner: Optimizer) -> tuple[Optimizer, ...]:
    return inner.optimizers if isinstance(inner, InnerOptimizers) else (inner,)


def _find_copies(inner: Optimizer, params: Sequence[Tensor]) -> list[str]:
    """List the keys of the inner state under which there are about the values of parameters."""
    sums: dict[Any, list[float]] = {}
    for param in params:
        own = local_tensor(param).detach().float()
        for key, each in inner.state[param].items():
            if not isinstance(each, Tensor) or each.layout is not torch.strided:
                continue
            kept = local_tensor(each).detach()
            if not (kept.is_floating_point() and kept.dim() and kept.shape == own.shape):
                continue  # a count of steps may equal a scalar parameter
            kept = kept.to(own.device, torch.float32)
            found = sums.setdefault(key, [0.0, 0.0])
            found[0] += float((kept - own).square().sum())
            found[1] += float(own.square().sum())
    return [str(key) for key, (apart, size) in sums.items() if apart < _NEAR**2 * size]


def _describe_copies(name: str, keys: Sequence[str]) -> str:
    return (
        f"{name} keeps a copy of the parameters in its state, under {', '.join(keys)}. Votes do "
        "not move it: if a step writes it back, the vote is undone. Expected an inner optimizer "
        "without copies of parameters. Use one such as AdamW"
    )


def list_made(inner: Optimizer) -> set[Tensor]:
    """List the parameters that have inner state now."""
    return {param for param, state in inner.state.items() if state}


def _set_to_zero(state: dict[str, Any]) -> None:
    for each in _list_floats(state):
        if each.dim() or not each.isfinite().all():
            each.zero_()
    if isinstance(state.get("step"), Tensor):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0


def _describe(names: Sequence[str], worker: int) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"the inner optimizer's state of {', '.join(names[:3])}{more} was not finite on rank "
        f"{worker}. That worker goes on from the common point with a fresh state there. Look for "
        "the cause in its data, lower the inner lr, or clip"
    )


def _list_floats(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """List the floating tensors of a parameter's state, or this rank's shards of them."""
    for each in state.values():
        if isinstance(each, Tensor) and each.is_floating_point():
            yield local_tensor(each)


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
    if scale is not None:
        parts = [] if _is_unscaled(inner) else _list_parts(inner)
        left = [each for each in parts if not _is_unscaled(each)]
        if left != [inner] or not getattr(inner, "_step_supports_amp_scaling", False):
            for each in left:
                _unscale(each, scale)
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


def _is_unscaled(optimizer: Optimizer) -> bool:
    """Return whether the GradScaler has unscaled this one by itself, as to clip its gradients."""
    stepping = find_scaler()
    states = {} if stepping is None else stepping[0]._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


def _unscale(inner: Optimizer, scale: Tensor) -> None:
    """Divide gradients by a GradScaler's factor, as its ``unscale_`` does."""
    factor = scale.double().reciprocal().float()
    for group in inner.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))

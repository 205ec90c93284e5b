"""The inner optimizer's state where it is not finite, and its fresh start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import InnerStateResetWarning
from distlion.optim.arguments import label_params
from distlion.step.gradients import warn_user
from distlion.step.param import local_tensor


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
def reset_broken(inner: Optimizer, params: Iterable[Tensor], *, worker: int) -> None:
    """Set the inner state of parameters to 0 where some of it is not finite, and warn.

    Args:
        inner: The optimizer whose state it is.
        params: Parameters that are at the common point.
        worker: This worker's rank.
    """
    broken = find_broken(inner, params)
    for param in broken:
        state = inner.state[param]
        for each in _list_floats(state):
            if each.dim() or not each.isfinite().all():
                each.zero_()
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    if broken:
        names = label_params(inner.param_groups)
        warn_user(_describe([names[param] for param in broken], worker), InnerStateResetWarning)


def _describe(names: Sequence[str], worker: int) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"the inner optimizer's state of {', '.join(names[:3])}{more} was not finite on rank "
        f"{worker}. That worker goes on from the common point with a state of 0 there. Look for "
        "the cause in its data, lower the inner lr, or clip"
    )


def _list_floats(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """List the floating tensors of a parameter's state, or this rank's shards of them."""
    for each in state.values():
        if isinstance(each, Tensor) and each.is_floating_point():
            yield local_tensor(each)

"""Hooks of ``state_dict()`` and ``load_state_dict()``, run where torch's own methods do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer


def run_hooks_of_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run an optimizer's hooks on the result of ``state_dict``."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def run_hooks_of_loading(optimizer: Optimizer, state_dict: Any) -> Any:
    """Run an optimizer's hooks before ``load_state_dict`` on a copy of the given state."""
    if isinstance(state_dict, Mapping):
        state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


@contextmanager
def after_hooks_of_loading(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from running the hooks before ``load_state_dict`` a second time."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks

"""Hooks of ``state_dict()`` and ``load_state_dict()``, run where torch's own methods do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError
from distlion.optim.saved_groups import shorten


def run_hooks_of_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run an optimizer's post-hooks on the result of ``state_dict``."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def run_hooks_of_loading(optimizer: Optimizer, state_dict: Any) -> Any:
    """Run the pre-hooks of ``load_state_dict`` on a shallow copy of the state."""
    if isinstance(state_dict, dict):
        state_dict = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def run_hooks_or_refuse(optimizer: Optimizer, state_dict: Any) -> Any:
    """Run the same where other ranks must hear of a hook that raises.

    Raises:
        CheckpointError: A hook raised; its error is the cause.
    """
    try:
        return run_hooks_of_loading(optimizer, state_dict)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"a pre-hook of load_state_dict() raised {type(error).__name__}: "
            f"{shorten(str(error))}. Nothing was changed"
        ) from error


@contextmanager
def after_hooks_of_loading(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch's ``load_state_dict`` from running the pre-hooks a second time."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks

    def restore(*_: object) -> None:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks

    # The only hook that torch runs, so that a post-hook finds the others in their place.
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict({0: restore})
    try:
        yield
    finally:
        restore()

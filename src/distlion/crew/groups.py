"""Hyperparameters that a newcomer or lagging worker takes from the most advanced one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distlion.errors import CrewError
from distlion.optim.saved_groups import WORKER_KEY

_OWN = ("params", "param_names", "aggregation", WORKER_KEY)
"""Keys that do not change during training."""


def describe_groups(
    groups: Sequence[Mapping[str, Any]], *, but: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the hyperparameters of all groups, as numbers, without some keys."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in (*_OWN, *but)
        }
        for group in groups
    ]


def check_groups(own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that another worker has as many groups as this one.

    Raises:
        CrewError: It has a different number of groups.
    """
    if len(given) != len(own):
        raise CrewError(
            f"the most advanced worker has {len(given)} param groups, and this one "
            f"{len(own)}; do all workers run the same script?"
        )


def take_groups(own: Sequence[dict[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Write another worker's hyperparameters into this one's groups.

    Raises:
        CrewError: It has a different number of groups.
    """
    check_groups(own, given)
    for group, values in zip(own, given, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key] = torch.full_like(group[key], value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

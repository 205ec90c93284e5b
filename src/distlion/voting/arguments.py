"""Checks of single arguments: each mistake has its message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError


def check_number(name: str, value: Any) -> float:
    """Return ``value`` as a float: a number, or a tensor with one element.

    Raises:
        UnsupportedTypeError: It is something else.
        InvalidArgumentError: It is not finite.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedTypeError(f"{name}={value!r}: expected a number")
    if not math.isfinite(value):
        raise InvalidArgumentError(f"{name}={value}: expected a finite number")
    return float(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidArgumentError(
            f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}"
        )


def check_positive(name: str, value: float | None) -> None:
    """Raise InvalidArgumentError unless ``value`` is None or above 0."""
    if value is not None and not check_number(name, value) > 0:
        raise InvalidArgumentError(f"{name}={value}: expected a number above 0")

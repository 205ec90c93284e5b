"""The momentum that a worker begins with when it joins others that have trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError

Newcomers = Literal["zeros", "donor", "mean"]
"""Zeros, the momentum of the first other worker, or the mean of all others."""


def check_newcomers(newcomers: object) -> None:
    """Raise InvalidArgumentError unless ``newcomers`` is one of the choices."""
    if newcomers not in get_args(Newcomers):
        raise InvalidArgumentError(
            f"newcomers={newcomers!r}: expected one of {', '.join(get_args(Newcomers))}"
        )


def begin_momentum(momenta: Iterable[Tensor], newcomers: Newcomers) -> Tensor:
    """Return the momentum of a newcomer.

    Equation:
        zeros: 0; donor: m_1; mean: (m_1 + ... + m_n) / n, added in float32 in this order

    Args:
        momenta: Momenta of the earlier workers in the order of their ranks: one or more, of equal
            shape and dtype.
        newcomers: The choice.

    Returns:
        A new tensor of the same shape and dtype.
    """
    total, n = None, 0
    for each in momenta:
        if newcomers == "zeros":
            return torch.zeros_like(each)
        if newcomers == "donor":
            return each.clone()
        total = each.to(torch.float32, copy=True) if total is None else total.add_(each)
        n, dtype = n + 1, each.dtype
    if total is None:
        raise InvalidArgumentError("nobody has a momentum that a newcomer could begin with")
    return (total / n).to(dtype)

"""Matrix products that every machine rounds alike, in place of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor


class NoProductError(AssertionError):
    """Directions were not orthogonalized by the products that this module replaces."""


@contextmanager
def portable_products(*, may_be_idle: bool) -> Iterator[None]:
    """Let torch multiply matrices and measure them by plain multiplications and additions.

    Args:
        may_be_idle: Whether this rank may have nothing to multiply.

    Raises:
        NoProductError: Nothing was multiplied: the library calls torch's products otherwise by now.
    """
    n_products = 0

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        nonlocal n_products
        n_products += 1
        return _add_up(left.unsqueeze(-1) * right.unsqueeze(-3), dim=-2)

    def measure(matrix: Tensor, *, keepdim: bool) -> Tensor:
        assert keepdim
        squares = (matrix * matrix).flatten(-2)
        return _add_up(squares, dim=-1).sqrt()[..., None, None]

    with ExitStack() as stack:
        for owner in (torch, Tensor):
            for name in ("matmul", "mm", "bmm"):
                stack.enter_context(patch.object(owner, name, multiply))
        stack.enter_context(patch.object(Tensor, "__matmul__", multiply))
        stack.enter_context(patch.object(torch.linalg, "matrix_norm", measure))
        yield
    if not n_products and not may_be_idle:
        raise NoProductError("no matrix product was computed; add its name to portable_products()")


def _add_up(terms: Tensor, *, dim: int) -> Tensor:
    """Add the second half of a dim to the first one until one element is left."""
    while (n := terms.shape[dim]) > 1:
        first, second, rest = terms.split([n // 2, n // 2, n % 2], dim)
        terms = torch.cat([first + second, rest], dim)
    return terms.squeeze(dim)

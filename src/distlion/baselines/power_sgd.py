"""PowerSGD: the mean gradient of a matrix as a product of two thin ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError

_LEAST_RATE = 2
_SEED_LIMIT = 1_000_000_000


@dataclass(frozen=True)
class PowerSGD:
    """Average gradients as matrices of low rank, and add what that lost to the next ones.

    Equation:
        M = G + E;  P = orthonormal columns of M Q;  Q' = M' P;  sent for G: P Q'';  E' = M - P Q''
        (PowerSGD, arXiv:1905.13727, Algorithms 1 and 2)
        M, (n, m), is the mean over workers: all that workers add up, M_i Q and M_i' P, is linear
        in their own M_i, and the mean of what each lost is what the mean lost. So the error of the
        mean is all the state that one process needs to train as N would.
        Q, (m, r), starts random and is kept, with orthonormal columns, from step to step.

    Args:
        rank: r, at least 1.
        start_step: Steps of a full all-reduce before it, at least 0; for PyTorch's hook at least 2.

    Raises:
        InvalidArgumentError: A number is out of its range.

    Notes:
        As in PyTorch's hook, a parameter of shape (n, ...) is a matrix of n rows, and one is left
        alone that would not shrink to less than half.
    """

    rank: int = 4
    start_step: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_step < 0:
            raise InvalidArgumentError(
                f"{self!r}: expected a rank of 1 or more and a start_step of 0 or more"
            )

    def sent_elements(self, shape: torch.Size) -> int | None:
        """Return how many numbers of a parameter a worker hands to all-reduces; None for all."""
        if len(shape) < 2 or shape.numel() == 0:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        n_sent = (rows + columns) * min(rows, columns, self.rank)
        return n_sent if _LEAST_RATE * n_sent < rows * columns else None

    def draw_factor(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draw the first Q of a parameter that is compressed: (m, r) float32, on the CPU."""
        rows, columns = shape[0], shape.numel() // shape[0]
        return torch.randn(columns, min(rows, columns, self.rank), generator=generator)

    def approximate(self, matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Approximate the mean M.

        Args:
            matrix: M, (n, m) float32. Read only.
            factor: Q, (m, r) float32, whose columns need not be orthonormal. Read only.

        Returns:
            The approximation P Q'', (n, m), and Q'', (m, r).
        """
        left = torch.linalg.qr(matrix @ torch.linalg.qr(factor).Q).Q
        right = matrix.T @ left
        return left @ right.T, right


def make_factor_generator(seed: int) -> torch.Generator:
    """Make the generator of all first factors, as PyTorch's hook seeds its own."""
    return torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(_SEED_LIMIT)))

"""PowerSGD: the mean gradient of a matrix as a product of two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError

_LEAST_RATE = 2
_SEED_LIMIT = 1_000_000_000


@dataclass(frozen=True)
class PowerSGD:
    """Average gradients as matrices of low rank, and add the error to the next ones.

    Equation:
        M = G + E;  P = orth(M orth(Q));  R = M^T P;  the mean becomes P R^T
        next E = M - P R^T;  next Q = R
        (PowerSGD, arXiv:1905.13727, Algorithms 1 and 2)
        G, (n, m), is the mean gradient; orth makes columns orthonormal; Q, (m, r), starts random.
        Workers add up M_i orth(Q) and M_i^T P, which are linear in their own M_i = G_i + E_i. E is
        the mean of their errors E_i: with Q, it is all the state needed to train as N workers.

    Args:
        rank: Rank r of the factors, at least 1.
        start_step: Steps with a full all-reduce before compression, at least 0; for PyTorch's hook
            at least 2.

    Raises:
        InvalidArgumentError: A number is out of its range.

    Notes:
        As in PyTorch's hook, a parameter of shape (n, ...) is a matrix of n rows. It is not
        compressed if it would not shrink to less than half. Each worker of the hook keeps the
        float32 sum of its gradients' differences from the mean; its rounding error grows with the
        steps. Where M is 0, the hook's orth of rank 1 or 2 gives NaN; here it does not.
    """

    rank: int = 4
    start_step: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidArgumentError(f"PowerSGD(rank={self.rank}): expected 1 or more")
        if self.start_step < 0:
            raise InvalidArgumentError(
                f"PowerSGD(start_step={self.start_step}): expected 0 or more"
            )

    def sent_elements(self, shape: torch.Size) -> int | None:
        """Return the numbers of a parameter that a worker hands to all-reduces; None for all."""
        if len(shape) < 2 or shape.numel() == 0:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        n_sent = (rows + columns) * min(rows, columns, self.rank)
        return n_sent if _LEAST_RATE * n_sent < rows * columns else None

    def draw_factors(self, shapes: Sequence[torch.Size], seed: int) -> dict[int, Tensor]:
        """Draw the first Q of every compressed parameter.

        Args:
            shapes: Shapes of the parameters, in the order of the model.
            seed: Seed, as in PyTorch's hook. The hook has the same factors if all parameters are in
                one bucket and their gradients arrive from the last to the first.

        Returns:
            The factors by position: (m, r) float32, on the CPU.
        """
        generator = torch.Generator().manual_seed(
            int(np.random.RandomState(seed).randint(_SEED_LIMIT))
        )
        positions: dict[tuple[int, int], list[int]] = {}
        for position, shape in reversed(list(enumerate(shapes))):
            if self.sent_elements(shape) is not None:
                matrix = shape[0], shape.numel() // shape[0]
                positions.setdefault(matrix, []).append(position)
        factors: dict[int, Tensor] = {}
        for (rows, columns), alike in positions.items():
            rank = min(rows, columns, self.rank)
            drawn = torch.randn(
                len(alike), columns, rank, generator=generator, dtype=torch.float32, device="cpu"
            )
            factors.update(zip(alike, drawn, strict=True))
        return factors

    def approximate(self, matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Approximate M.

        Args:
            matrix: M, (n, m) float32. Read only.
            factor: Q, (m, r) float32. Read only.

        Returns:
            The approximation P R^T, (n, m), and the next Q, (m, r).
        """
        left = torch.linalg.qr(matrix @ torch.linalg.qr(factor).Q).Q
        right = matrix.T @ left
        return left @ right.T, right

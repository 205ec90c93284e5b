"""A few elements of every parameter, the same on all workers, for comparisons between workers.

Squared norms alone would be fewer numbers, but would not give the norm of a mean. Sums over a few
hundred numbers are exact, so that all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.step.param import VotingParam

SAMPLE_ELEMENTS = 256
"""Sampled elements of each parameter; all elements of a smaller one."""


def draw_sample(params: Sequence[VotingParam], seed: int) -> list[Tensor]:
    """Draw elements of every parameter, with replacement where there are more than 256.

    Args:
        params: Parameters whose local momentum is sampled.
        seed: Seed, equal on all workers.

    Returns:
        Ascending indices for each parameter, (at most 256,) int64.
    """
    sample = []
    for position, size in enumerate(param.n_kept for param in params):
        # torch takes 63 bits of a seed.
        generator = torch.Generator().manual_seed((seed + position) % (1 << 63))
        drawn = torch.randint(max(1, size), (SAMPLE_ELEMENTS,), generator=generator, device="cpu")
        sample.append(
            torch.arange(size, device="cpu") if size <= SAMPLE_ELEMENTS else drawn.sort().values
        )
    return sample


def place_sample(sample: Sequence[Tensor], params: Sequence[VotingParam]) -> list[Tensor]:
    """Move the result of ``draw_sample`` to the parameters' devices."""
    return [index.to(params[position].device) for position, index in enumerate(sample)]


def measure_coherence(rows: Sequence[Sequence[float]]) -> float:
    """Measure the agreement of workers.

    Equation:
        ||(1 / N) sum_i m_i||^2 / ((1 / N) sum_i ||m_i||^2)
        1 where all are equal, about 1 / N where they have nothing in common; 1 where all are 0

    Args:
        rows: m_i, one row for each worker.
    """
    n = len(rows)
    mean_square = math.fsum(value * value for row in rows for value in row) / n
    square_of_mean = math.fsum((math.fsum(column) / n) ** 2 for column in zip(*rows, strict=True))
    return square_of_mean / mean_square if mean_square else 1.0

"""Two-sided confidence intervals, as the second study and the one of local steps want them.

The first study decides by one-sided bounds: those are in ``evidence``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95

Array = npt.NDArray[np.float64]


def spread(by_unit: Array) -> tuple[float, float]:
    """Return half the width of the 95 % interval, and the p-value of no difference.

    Args:
        by_unit: (seeds, units) differences, two seeds or more. A single unit says nothing about
            units: then seeds alone count.

    Returns:
        Of Student's t over seeds and the normal distribution over units, the wider interval and
        the larger p-value.
    """
    n_seeds, n_units = by_unit.shape
    mean = abs(float(by_unit.mean()))
    over_seeds = float(by_unit.mean(axis=1).std(ddof=1)) / math.sqrt(n_seeds)
    over_units = 0.0
    if n_units > 1:
        over_units = float(by_unit.mean(axis=0).std(ddof=1)) / math.sqrt(n_units)
    tail = (1 + CONFIDENCE) / 2
    half = max(stdtrit(n_seeds - 1, tail) * over_seeds, ndtri(tail) * over_units)
    p_values = (
        _two_sided(lambda t: float(stdtr(n_seeds - 1, -t)), mean, over_seeds),
        _two_sided(lambda z: float(ndtr(-z)), mean, over_units),
    )
    return float(half), max(p_values)


def _two_sided(lower_tail: Callable[[float], float], mean: float, error: float) -> float:
    """Return the p-value of a mean with a standard error; equal differences leave no doubt."""
    if error == 0:
        return 0.0 if mean else 1.0
    return 2 * lower_tail(mean / error)

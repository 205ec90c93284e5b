"""Numbers that clients report with their votes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def average_metrics(reported: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted means of the numbers that all clients report.

    Args:
        reported: Weight, above 0, and numbers of each client.

    Returns:
        The mean of each number that is reported, and finite, on all clients.
    """
    if not reported:
        return {}
    total = sum(weight for weight, _ in reported)
    means = {}
    for name in reported[0][1]:
        values = [numbers.get(name, math.nan) for _, numbers in reported]
        if all(math.isfinite(value) for value in values):
            weights = [weight / total for weight, _ in reported]
            means[name] = sum(map(float.__mul__, weights, map(float, values)))
    return means

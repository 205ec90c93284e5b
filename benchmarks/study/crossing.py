"""When the curve of a run reaches a value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Curve = Sequence[Sequence[float]]
"""Rows of steps, loss and accuracy."""


def find_column(task: str) -> int:
    """Return where in a row of a curve the outcome of a task is."""
    return 2 if task == "images" else 1


def cross(curve: Curve, task: str, value: float) -> float | None:
    """Return the step of the first crossing, on straight lines between scores; None without one.

    A curve that is there at its first score counts as there at that step, no earlier.
    """
    sign = 1.0 if task == "images" else -1.0
    column = find_column(task)
    points = [(row[0], sign * (row[column] - value)) for row in curve]
    if points[0][1] >= 0:
        return float(points[0][0])
    for (begin, below), (end, above) in pairwise(points):
        if above >= 0:
            return begin + (end - begin) * -below / (above - below)
    return None

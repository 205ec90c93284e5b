"""Reasons why a comparison cannot rank its methods: few seeds, short runs, narrow grids."""

from __future__ import annotations

from distlion_lab.report.comparison import Comparison

LEAST_SEEDS = 3
"""Number of seeds below which the spread over seeds is hardly known."""

LEAST_STEPS = 200
"""Number of steps below which a run ends in or soon after its warm-up."""

_MOST_NAMED = 5


def list_warnings(comparison: Comparison) -> list[str]:
    """List the reasons why the numbers of a comparison cannot rank its methods; empty for none."""
    return [*_warn_of_size(comparison), *_warn_of_edges(comparison)]


def _warn_of_size(comparison: Comparison) -> list[str]:
    seeds, steps = comparison.settings["seeds"], comparison.settings["steps"]
    if seeds >= LEAST_SEEDS and steps >= LEAST_STEPS:
        return []
    runs = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return [
        f"The reported runs have {runs} and {steps} steps. That is too little to rank methods: "
        "other seeds or longer runs may reverse the order. Repeat with at least "
        f"--seeds {LEAST_SEEDS} --steps {LEAST_STEPS} before you choose one"
    ]


def _warn_of_edges(comparison: Comparison) -> list[str]:
    edges = [cell for cell in comparison.cells if cell.is_at_edge]
    if not edges:
        return []
    names = [f"{cell.method} with {cell.workers} workers" for cell in edges[:_MOST_NAMED]]
    more = f" and {len(edges) - _MOST_NAMED} more" if len(edges) > _MOST_NAMED else ""
    return [
        f"The best learning rate is at the edge of its grid for {', '.join(names)}{more}. A better "
        "one may lie beyond, and these methods may be better than shown. Widen the grid with --lrs "
        "or --lr-factor"
    ]

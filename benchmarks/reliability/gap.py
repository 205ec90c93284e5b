"""The warning's second form: a worker's agreement beside the median worker's, on new seeds."""

from __future__ import annotations

from statistics import median
from typing import Any

import study_path  # noqa: F401
from cells import Cell
from plan import IMAGES
from protocol import CONDITIONS, MAJORITY, RATES, WORKERS, Condition, Find, name_condition
from runs import RunConfig

SEEDS = (4, 5, 6)
"""The seeds 1 to 3 showed that the first form fails, and set the gap of the second."""


def list_condition(condition: Condition) -> list[RunConfig]:
    """Return the runs of one row, by seed."""
    alpha, flippers = condition
    factor = -1.0 if flippers else 1.0
    cell = Cell(IMAGES, MAJORITY, WORKERS, alpha=alpha, attackers=flippers, factor=factor)
    return [cell.config(RATES[alpha], seed, is_tuning=False) for seed in SEEDS]


def list_gap() -> list[RunConfig]:
    """Return all runs, all conditions of a seed before the next seed."""
    by_seed = zip(*map(list_condition, CONDITIONS), strict=True)
    return [run for runs in by_seed for run in runs]


def decide_warning(find: Find) -> str:
    """Return "holds" if each flipper is named, and nobody else, on even data; else "fails"."""
    for condition in CONDITIONS:
        alpha, flippers = condition
        records = _find_all(find, condition)
        if alpha is None and not records:
            return "open"
        if alpha is None and any(sorted(r["named"]) != list(range(flippers)) for r in records):
            return "fails"
    return "holds"


def describe_gap(find: Find) -> str:
    """Write the table of workers that were named."""
    lines = [
        "## The warning, second form",
        "",
        "Majority, seeds 4 to 6: each worker's agreement, mean of a run, minus the median worker's",
        "in points, and workers that the warning named.",
        "",
        "| data | flippers | others | flippers named | others named |",
        "|---|---:|---:|---:|---:|",
    ]
    for condition in CONDITIONS:
        flippers, records = condition[1], _find_all(find, condition)
        if not records:
            lines.append(f"| {name_condition(condition)} | open | open | open | open |")
            continue
        gaps = [_subtract_median(record["agreement"]) for record in records]
        named = [worker < flippers for record in records for worker in record["named"]]
        shown = [
            _show([gap for row in gaps for gap in row[workers]])
            for workers in (slice(flippers), slice(flippers, None))
        ]
        counts = [f"{sum(named)} of {flippers * len(records)}", str(named.count(False))]
        lines.append(f"| {' | '.join([name_condition(condition), *shown, *counts])} |")
    return "\n".join([*lines, "", f"On even data: {decide_warning(find)}.", ""])


def _find_all(find: Find, condition: Condition) -> list[dict[str, Any]]:
    records = [find(run.name) for run in list_condition(condition)]
    return [each for each in records if each] if all(records) else []


def _subtract_median(shares: list[float]) -> list[float]:
    usual = median(shares)
    return [100 * (share - usual) for share in shares]


def _show(gaps: list[float]) -> str:
    return f"{min(gaps):+.1f} to {max(gaps):+.1f}" if gaps else ""

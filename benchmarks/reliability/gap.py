"""The warning's second form: a worker's agreement beside the median worker's, on new seeds."""

from __future__ import annotations

from statistics import median
from typing import Any

import study_path  # noqa: F401
from protocol import CONDITIONS, MAJORITY, Condition, Find, list_runs, name_condition
from runs import RunConfig

SEEDS = (4, 5, 6)
"""Seeds 1 and 2 showed that the first form fails; seed 1 set the gap of the second."""


def list_condition(condition: Condition) -> list[RunConfig]:
    """Return the runs of one row, by seed."""
    return list_runs(MAJORITY, condition, SEEDS)


def list_gap() -> list[RunConfig]:
    """Return all runs, all conditions of a seed before the next seed."""
    by_seed = zip(*map(list_condition, CONDITIONS), strict=True)
    return [run for runs in by_seed for run in runs]


def decide_warning(find: Find) -> str:
    """Return "holds" if each flipper is named, and nobody else, on even data; else "fails".

    A run that is there may show that it fails; that it holds is shown by all of them.
    """
    even = [run for run in list_gap() if run.alpha is None]
    records = [(find(run.name), run.attackers) for run in even]
    if any(record and sorted(record["named"]) != list(range(n)) for record, n in records):
        return "fails"
    return "holds" if all(record for record, _ in records) else "open"


def describe_gap(find: Find) -> str:
    """Write the table of workers that were named."""
    lines = [
        "## The warning, second form",
        "",
        "Majority, seeds 4 to 6. Distance of a worker's agreement to the median worker's, in",
        "points: a mean over parameters and a run. The warning pools elements of its last looks.",
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

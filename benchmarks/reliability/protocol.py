"""The protocol as code: its runs, what they decide, and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import study_path  # noqa: F401
from cells import SEEDS, Cell
from plan import IMAGES
from runs import RunConfig

METHODS = MAJORITY, *WEIGHED = ("majority", "weighted", "gated")
RATES: dict[float | None, float] = {None: 0.0016, 0.1: 0.0002}
"""By alpha: the study's choice for a majority of 8 workers without flippers."""
FLIPPERS, WORKERS, MARGIN, CHANCE = (0, 2, 3), 8, 1.0, 10.0
CONDITIONS = tuple((alpha, flippers) for alpha in RATES for flippers in FLIPPERS)

HEAD = """# Votes weighed by agreement

Test accuracy in %, mean ± standard deviation of three seeds; agreement, a mean over a run, with the
majority of the others; workers that the warning's first form named. By the
[protocol](../../studies/reliability-protocol.md).
"""
Find = Callable[[str], dict[str, Any] | None]
Condition = tuple[float | None, int]


def list_runs(method: str, condition: Condition, seeds: Sequence[int] = SEEDS) -> list[RunConfig]:
    """Return the runs of one cell of the table, by seed."""
    alpha, flippers = condition
    factor = -1.0 if flippers else 1.0
    cell = Cell(IMAGES, method, WORKERS, alpha=alpha, attackers=flippers, factor=factor)
    return [cell.config(RATES[alpha], seed, is_tuning=False) for seed in seeds]


def list_open(find: Find) -> list[RunConfig]:
    """Return the runs without a record, all conditions of a seed before the next seed."""
    cells = [list_runs(method, condition) for condition in CONDITIONS for method in METHODS]
    by_seed = zip(*cells, strict=True)
    return [run for runs in by_seed for run in runs if find(run.name) is None]


def find_all(find: Find, method: str, condition: Condition) -> list[dict[str, Any]]:
    """Return the records of one cell of the table; none before all are there."""
    records = [find(run.name) for run in list_runs(method, condition)]
    return [each for each in records if each] if all(records) else []


def score(record: dict[str, Any]) -> float:
    """Return the test accuracy in percent, that of chance if the run diverged."""
    return 100 * record["test"]["accuracy"] if record["test"] else CHANCE


def judge(find: Find, method: str, condition: Condition) -> str:
    """Return "better", "worse" or "inconclusive" beside the majority; "open" without all runs."""
    both = [find_all(find, each, condition) for each in (method, MAJORITY)]
    own, other = ([score(record) for record in records] for records in both)
    return compare(own, other) if own and other else "open"


def compare(own: list[float], other: list[float]) -> str:
    """Return "better", "worse" or "inconclusive", of accuracies in percent by seed."""
    leads = [one - another for one, another in zip(own, other, strict=True)]
    if min(leads) > 0 and fmean(leads) >= MARGIN:
        return "better"
    return "worse" if max(leads) < 0 and fmean(leads) <= -MARGIN else "inconclusive"


def decide(find: Find, method: str) -> str:
    """Return "build" if it helps against flippers on even data and harms nowhere, or "reject"."""
    verdicts = {condition: judge(find, method, condition) for condition in CONDITIONS}
    if "open" in verdicts.values():
        return "open"
    helps = all(verdicts[None, flippers] == "better" for flippers in FLIPPERS if flippers)
    return "build" if helps and "worse" not in verdicts.values() else "reject"


def describe(find: Find) -> str:
    """Write the page from the records that are there."""
    heads = ["data", *METHODS, "agreement of flippers", "of others", "flippers named", "others"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(METHODS) + 4)]
    lines += [_write_row(find, condition) for condition in CONDITIONS]
    decisions = [f"{each}: {decide(find, each)}" for each in WEIGHED]
    return "\n".join([HEAD, *lines, "", f"Decided: {', '.join(decisions)}.", ""])


def name_condition(condition: Condition) -> str:
    """Name the data and the number of flippers."""
    alpha, flippers = condition
    data = "even" if alpha is None else f"alpha {alpha:g}"
    return f"{data}, {flippers} flip" if flippers else data


def _write_row(find: Find, condition: Condition) -> str:
    flippers, cells = condition[1], [name_condition(condition)]
    for method in METHODS:
        found = [score(record) for record in find_all(find, method, condition)]
        shown = f"{fmean(found):.1f} ± {stdev(found):.1f}, " if found else ""
        verdict = judge(find, method, condition)
        cells.append(shown[:-2] if found and method == MAJORITY else shown + verdict)
    records = find_all(find, MAJORITY, condition)
    for workers in (slice(flippers), slice(flippers, None)):
        shares = [share for record in records for share in record["agreement"][workers]]
        cells.append(f"{min(shares):.2f} to {max(shares):.2f}" if shares else "")
    named = [worker < flippers for record in records for worker in record["named"]]
    cells += [f"{sum(named)} of {flippers * len(records)}", str(named.count(False))]
    return f"| {' | '.join(cells)} |"

"""What is trained, by which methods, at which rates and until when: the protocol as data."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import target_path  # noqa: F401
from cells import Choice, Find, Setting, choose_rate, list_open
from plan import SHORT
from runs import RunConfig
from settings import TargetCell

WORKERS = 8
LINKS = ("10mbit", "30mbit", "100mbit", "300mbit")
PERIODS = (8, 32)
"""Local steps from exchange to exchange; the outer step is chosen at the first."""
TEXT = Setting("text", 448, 64, 14, {"width": 168, "layers": 3, "heads": 4, "context": 64})

DDP, MAJORITY = "global-adamw", "majority"
TOGETHER = (DDP, MAJORITY, SHORT)
"""What exchanges in each step."""
TIMED_AS = {SHORT: MAJORITY}
"""Whose steps others have: the same bits and arithmetic."""
WAYS = {"majority-every": "votes", "diloco": "means"}
"""What is exchanged: names of methods begin so."""
OUTERS = {"": "Nesterov", "-plain": "plain"}
"""The outer step: names of methods end so."""
EXCHANGE, PERIOD = "exchange of {}", "period of {}"
"""What the lab times beside whole steps; a period has the fewer local steps."""
_LOCAL = re.compile(rf"(?P<way>{'|'.join(WAYS)})-(?P<every>\d+)(-plain)?")
_ADAMW_CENTER = 4e-3
_CENTERS = {MAJORITY: 4e-4, SHORT: 1.6e-3}


@dataclass(frozen=True)
class PeriodCell(TargetCell):
    """A method on the text; its curve is one of test data."""

    @property
    def center(self) -> float:
        return _CENTERS.get(self.method, _ADAMW_CENTER)


def make_cell(method: str) -> PeriodCell:
    """Return the cell of a method; AdamW's mean gradient does not depend on N but by rounding."""
    return PeriodCell(TEXT, method, 0 if method == DDP else WORKERS)


def make_local_cell(way: str, every: int, outer: str) -> PeriodCell:
    """Return the cell of a method with local steps, in its grid the best rate of fewer steps."""
    cell = make_cell(f"{way}-{every}{outer}")
    if every == PERIODS[0]:
        return cell
    return replace(cell, centered_on=make_local_cell(way, PERIODS[0], outer))


def read_local(method: str) -> tuple[str, int] | None:
    """Return what a method exchanges and after how many local steps; None without local steps."""
    match = _LOCAL.fullmatch(method)
    return (WAYS[match["way"]], int(match["every"])) if match else None


def tune_outers(way: str, find: Find) -> dict[str, Choice]:
    """Return what tuning has come to with each outer step."""
    return {outer: choose_rate(make_local_cell(way, PERIODS[0], outer), find) for outer in OUTERS}


def choose_outer(way: str, find: Find) -> str | None:
    """Return the outer step with the lower validation loss at its best rate; None before."""
    choices = tune_outers(way, find)
    ends = {outer: best_loss(choice) for outer, choice in choices.items()}
    known = {outer: loss for outer, loss in ends.items() if loss is not None}
    return min(known, key=lambda outer: known[outer]) if len(known) == len(OUTERS) else None


def best_loss(choice: Choice) -> float | None:
    """Return the validation loss at the rate that was chosen; None before."""
    return None if choice.rate is None else choice.losses[choice.rate]


def list_cells(find: Find) -> list[PeriodCell]:
    """Return the cells that are reported, as far as tuning has chosen them."""
    cells = [make_cell(method) for method in TOGETHER]
    for way in WAYS:
        outer = choose_outer(way, find)
        if outer is not None:
            cells += [make_local_cell(way, every, outer) for every in PERIODS]
    return cells


def list_open_runs(find: Find) -> list[RunConfig]:
    """Return what can be run now and has not been: rates to be tried first, then by seed."""
    runs = [run for cell in list_cells(find) for run in list_open(cell, find)]
    for way in WAYS:
        runs += [run for choice in tune_outers(way, find).values() for run in choice.wanted]
    return sorted(runs, key=lambda run: run.seed)

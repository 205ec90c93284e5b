"""The answers of the records: differences from AdamW, and the learning rate to try first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import study_path  # noqa: F401
from cells import Cell, Find, choose_rate
from design import PARTS, Part, list_tries, make_cell
from differences import Difference, Verdict, decide, find_difference
from evidence import Ending
from settings import ADAMW, CAUTIOUS, FACTORS, TASKS, VOTES

WANTED_TASKS = 2
"""Tasks of three on which a rule must be near AdamW."""


@dataclass(frozen=True)
class Claim:
    """A method beside AdamW, in a setting of a part."""

    part: str
    setting: str
    difference: Difference

    @property
    def method(self) -> str:
        """Its name."""
        return self.difference.method.cell.method

    @property
    def is_near(self) -> bool:
        """Whether the whole interval is less than the margin above AdamW."""
        return self.difference.is_whole and self.difference.high < self.difference.margin


def list_claims(find: Find) -> list[Claim]:
    """List methods beside AdamW, with verdicts under one false discovery rate in each part."""
    claims = []
    for part in PARTS:
        if part.factors:
            continue
        places = [
            (setting, method)
            for setting in part.settings
            for method in part.methods
            if method != ADAMW
        ]
        found = [_compare(part, setting, method, find) for setting, method in places]
        for (setting, _), difference in zip(places, decide(found), strict=True):
            claims.append(Claim(part.name, setting, difference))
    return claims


def _compare(part: Part, setting: str, method: str, find: Find) -> Difference:
    own, adamw = (Ending.find(part.make_cell(setting, each), find) for each in (method, ADAMW))
    return find_difference(own, adamw)


def judge_aim(claims: Sequence[Claim], method: str = CAUTIOUS) -> str:
    """Return whether a method is near AdamW on two of three tasks: yes, no, or not yet known."""
    own = [each for each in claims if each.method == method and each.part in _BASES]
    if sum(each.is_near for each in own) >= WANTED_TASKS:
        return "yes"
    still = sum(each.is_near or each.difference.verdict is Verdict.OPEN for each in own)
    return "not yet known" if still >= WANTED_TASKS else "no"


_BASES = tuple(f"f-{task}" for task in TASKS)


# The rate of a first try


@dataclass(frozen=True)
class FirstTry:
    """Regrets of one rule on one task.

    Attributes:
        task, method: Which ones.
        regrets: Validation loss at a factor of AdamW's best rate, less the lowest of all rates that
            were tried, by factor; infinite for a run that diverged.
    """

    task: str
    method: str
    regrets: dict[float, float]


def list_first_tries(find: Find) -> list[FirstTry]:
    """List tasks and rules whose runs are all there."""
    found = []
    for task in TASKS:
        for method in VOTES:
            regrets = _find_regrets(make_cell(task, method), find)
            if regrets is not None:
                found.append(FirstTry(task, method, regrets))
    return found


def _find_regrets(cell: Cell, find: Find) -> dict[float, float] | None:
    choice = choose_rate(cell, find)
    records = {each: find(run.name) for each, run in list_tries(cell, find, FACTORS).items()}
    if choice.rate is None or any(record is None for record in records.values()):
        return None
    losses = {
        factor: math.inf if record["diverged"] else float(record["validation"][-1][1])
        for factor, record in records.items()
        if record is not None
    }
    lowest = min(*choice.losses.values(), *losses.values())
    return {factor: loss - lowest for factor, loss in losses.items()}


def choose_factor(tries: Sequence[FirstTry]) -> float | None:
    """Return the factor with the smallest largest regret; None before all runs are there."""
    if len(tries) < len(TASKS) or {each.task for each in tries} != set(TASKS):
        return None
    return min(FACTORS, key=lambda factor: max(each.regrets[factor] for each in tries))

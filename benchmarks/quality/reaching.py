"""How many steps a method takes to a close target: 85 % accuracy, or nearly AdamW's last loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import study_path  # noqa: F401
from cells import Find
from crossing import cross
from design import choose_recipe, make_cell
from evidence import Ending
from settings import CAUTIOUS, PAPER, SHORT

ACCURACY = 0.85
NEAR_NATS = 0.02
"""Above the last validation loss of AdamW, mean over seeds."""
SHOWN = ("text-small-4k", "text-small-16k", "text-medium-4k", "images-30")
"""Runs of 1,000 steps end far from AdamW, those of 10 epochs just at 85 %."""


@dataclass(frozen=True)
class Reach:
    """A method on the way to a target.

    Attributes:
        setting, method: Which one.
        target: Validation accuracy, or validation loss.
        steps: By seed; None where it is not reached, or the run diverged.
    """

    setting: str
    method: str
    target: float
    steps: Mapping[int, float | None]

    def describe(self) -> str:
        """Return mean and range, or how many seeds reach it."""
        found = [each for each in self.steps.values() if each is not None]
        if len(found) < len(self.steps):
            return f"{len(found)} of {len(self.steps)} seeds reach it"
        return f"{fmean(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"


def list_reached(find: Find) -> Iterator[Reach]:
    """List AdamW and votes on the way to the target of each setting whose runs are all there."""
    for setting in SHOWN:
        task = setting.partition("-")[0]
        adamw = choose_recipe("adamw", task, find).method
        if adamw is None:
            continue
        endings = [
            Ending.find(make_cell(setting, method), find)
            for method in (adamw, PAPER, SHORT, CAUTIOUS)
        ]
        if endings[0].has_diverged or not all(ending.is_whole for ending in endings):
            continue
        target = _set_target(task, endings[0])
        for ending in endings:
            yield Reach(setting, ending.cell.method, target, _list_steps(ending, target))


def _set_target(task: str, adamw: Ending) -> float:
    if task == "images":
        return ACCURACY
    return fmean(record["validation"][-1][1] for record in adamw.records.values()) + NEAR_NATS


def _list_steps(ending: Ending, target: float) -> dict[int, float | None]:
    task = ending.cell.setting.task
    return {
        seed: None if record["diverged"] else cross(record["validation"], task, target)
        for seed, record in ending.records.items()
    }

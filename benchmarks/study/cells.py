"""A method under one condition: how its rate is chosen, and which runs it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runs import RunConfig

SEEDS = (1, 2, 3)
TUNING_SEED = 0
FACTOR = 2.0
MOST_RATES = 7

Find = Callable[[str], Mapping[str, Any] | None]
"""Return the record of a run by its name, or None."""


@dataclass(frozen=True)
class Setting:
    """What all runs of a task share.

    Attributes:
        task: ``images`` or ``text``.
        steps, batch, evaluations, network: As in ``RunConfig``.
    """

    task: str
    steps: int
    batch: int
    evaluations: int
    network: Mapping[str, int]


# The middle of the three rates that are tried first; protocol.md says where they are from.
CENTERS: Mapping[str, Mapping[str, float]] = {
    "images": {
        "global-adamw": 4e-3,
        "terngrad-adamw": 4e-3,
        "global-sgd": 0.1,
        "dgc": 0.1,
        "shared": 2e-3,
        "lion": 4e-4,
    },
    "text": {
        "global-adamw": 4e-3,
        "shared": 4e-3,
        "lion": 1e-3,
    },
}


@dataclass(frozen=True)
class Cell:
    """A method under one condition: its tuning, then its reported runs.

    Attributes:
        setting: Task and budget.
        method: Name.
        workers: N; 0 where nothing depends on it.
        alpha: Concentration of classes on workers; None: even.
        attackers, factor: Workers that multiply their gradient, and by what.
        tuned_as: The cell whose rate is taken over; None: a rate of its own.
        centered_on: The cell whose rate is the middle of the three that are tried first; None: the
            method's own center.
        is_screened: Whether tuning is all: judged by validation data, without reported runs.
        seeds: Of the reported runs.
    """

    setting: Setting
    method: str
    workers: int
    alpha: float | None = None
    attackers: int = 0
    factor: float = 1.0
    tuned_as: Cell | None = None
    centered_on: Cell | None = None
    is_screened: bool = False
    seeds: tuple[int, ...] = SEEDS

    def config(self, rate: float, seed: int, *, is_tuning: bool) -> RunConfig:
        """Return one run."""
        return RunConfig(
            task=self.setting.task,
            method=self.method,
            workers=self.workers,
            lr=rate,
            seed=seed,
            steps=self.setting.steps,
            batch=self.setting.batch,
            evaluations=self.setting.evaluations,
            alpha=self.alpha,
            attackers=self.attackers,
            factor=self.factor,
            network=dict(self.setting.network),
            is_tuning=is_tuning,
        )

    def tuning(self, rate: float) -> RunConfig:
        """Return the run that tries a rate."""
        return self.config(rate, TUNING_SEED, is_tuning=True)

    def has_made(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is that of one of its runs, at whatever rate and seed."""
        run = record["config"]
        if run["method"] != self.method:
            return False
        own = self.config(run["lr"], run["seed"], is_tuning=run["is_tuning"])
        return own.name == record["name"]

    @property
    def center(self) -> float:
        """The middle of the first three rates, where no other cell's rate is."""
        centers = CENTERS[self.setting.task]
        family = "shared" if self.method.startswith("shared-") else self.method
        return centers.get(family, centers["lion"])

    @property
    def most_rates(self) -> int:
        """How many rates may be tried."""
        return MOST_RATES


@dataclass(frozen=True)
class Choice:
    """What tuning has come to.

    Attributes:
        losses: Validation loss of each rate that was tried, in ascending order of rates; infinite
            for a run that diverged.
        wanted: Runs still to be made before anything is chosen.
        rate: The best; None before.
        at_edge: Whether it is the lowest or highest of all that were allowed.
    """

    losses: Mapping[float, float]
    wanted: tuple[RunConfig, ...]
    rate: float | None
    at_edge: bool


def choose_rate(cell: Cell, find: Find) -> Choice:
    """Choose by validation loss: three rates, extended while the best is at an edge."""
    if cell.tuned_as is not None:
        return choose_rate(cell.tuned_as, find)
    center = cell.center
    if cell.centered_on is not None:
        centered = choose_rate(cell.centered_on, find)
        if centered.rate is None:
            return replace(centered, losses={})
        center = centered.rate
    rates = [_round(center * FACTOR**power) for power in (-1, 0, 1)]
    while True:
        losses = {rate: _final_loss(find(cell.tuning(rate).name)) for rate in rates}
        missing = tuple(cell.tuning(rate) for rate, loss in losses.items() if loss is None)
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        if missing:
            return Choice(known, missing, None, False)
        best = min(rates, key=lambda rate: known[rate])
        at_edge = best in (rates[0], rates[-1])
        if not at_edge or len(rates) >= cell.most_rates:
            return Choice(known, (), best, at_edge)
        if best == rates[0]:
            rates.insert(0, _round(best / FACTOR))
        else:
            rates.append(_round(best * FACTOR))


def _round(rate: float) -> float:
    return float(f"{rate:.4g}")


def _final_loss(record: Mapping[str, Any] | None) -> float | None:
    if record is None:
        return None
    return math.inf if record["diverged"] else float(record["validation"][-1][1])


def reported(cell: Cell, rate: float) -> list[RunConfig]:
    """Return the runs of a cell that are reported."""
    if cell.is_screened:
        return []
    return [cell.config(rate, seed, is_tuning=False) for seed in cell.seeds]


def list_open(cell: Cell, find: Find) -> list[RunConfig]:
    """Return the runs of a cell that can be done now and are not."""
    choice = choose_rate(cell, find)
    if choice.rate is None:
        return list(choice.wanted)
    return [run for run in reported(cell, choice.rate) if find(run.name) is None]

"""The settings of a comparison, checked at construction, and their runs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlion.errors import InvalidArgumentError
from distlion_lab.training.device import check_device
from distlion_lab.training.methods import RECIPE, find_method
from distlion_lab.training.run_settings import RunSettings
from distlion_lab.training.train_settings import TaskName, TrainSettings, WorkSettings

DEFAULT_METHODS = (RECIPE, "majority", "global-lion", "global-adamw")
_WORKERS = (4, 8)
_STEPS = 200
# Warm-up and the time between evaluations are each this part of a run: a tenth.
_PARTS = 10

TUNING_SEED = 0
"""Seed that chooses learning rates and is never reported; seeds 1, 2, ... are reported."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings(WorkSettings):
    """Settings of a comparison; ``steps`` are those of a reported run.

    Args:
        methods: Names of methods, each once.
        workers: Numbers of virtual workers, each once; 1 or more.
        seeds: Reported runs of each method and number of workers, at least 1.
        lrs: Number of learning rates that each method tries, at least 1. With 1 nothing is tuned.
        lr_factor: Ratio of neighbors on the grid, above 1.
        lr_scale: Factor of the centers of all grids, above 0. Larger models and longer runs need
            smaller learning rates with every method.
        tuning_steps: Steps of a run that only chooses the learning rate, at least 1.
        weight_decay: Weight decay of all methods; None for each method's own.

    Raises:
        InvalidArgumentError: A value is out of its range, or a method unknown.
    """

    methods: tuple[str, ...]
    workers: tuple[int, ...]
    seeds: int
    lrs: int
    lr_factor: float
    lr_scale: float
    tuning_steps: int
    weight_decay: float | None

    @classmethod
    def with_defaults(cls, task: TaskName, **given: Any) -> CompareSettings:
        """Fill absent settings, and None, with defaults, as ``distlion train`` does for its own.

        Raises:
            InvalidArgumentError: As in the class.
            TypeError: A name is not a setting.
        """
        given = {name: value for name, value in given.items() if value is not None}
        fields = {field.name for field in dataclasses.fields(cls)} - {"workers"}
        shared = fields & {field.name for field in dataclasses.fields(TrainSettings)}
        one = {name: value for name, value in given.items() if name in shared}
        steps = given.get("steps", _STEPS)
        one = {"steps": steps, "warmup_steps": steps // _PARTS, **one}
        one = {"eval_every": max(1, steps // _PARTS), **one}
        trained = TrainSettings.with_defaults(task, **one)
        settings = {name: getattr(trained, name) for name in shared} | {
            "methods": DEFAULT_METHODS,
            "workers": _WORKERS,
            "seeds": 3,
            "lrs": 3,
            "lr_factor": 3.0,
            "lr_scale": 1.0,
            "tuning_steps": steps,
            # Each method has its own.
            "weight_decay": None,
            "device": "cpu",
        }
        return cls(**settings | given)

    def __post_init__(self) -> None:
        for name in ("seeds", "lrs", "steps", "tuning_steps"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not 1 < self.lr_factor < math.inf:
            raise InvalidArgumentError(f"lr_factor is {self.lr_factor}; expected a number above 1")
        if not 0 < self.lr_scale < math.inf:
            raise InvalidArgumentError(f"lr_scale is {self.lr_scale}; expected a number above 0")
        for name in ("methods", "workers"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InvalidArgumentError(
                    f"{name} are {', '.join(map(str, values)) or 'none'}; expected one or more, "
                    "each once"
                )
        check_device(self.device)
        for cell in self.cells():
            if len(set(cell.grid())) < self.lrs:
                raise InvalidArgumentError(
                    f"lr_factor is {self.lr_factor}; two of {self.lrs} learning rates are equal to "
                    "three digits: expected a larger factor"
                )
            cell.tuning_runs()
            cell.reported_runs(1e-3)

    def cells(self) -> list[Cell]:
        """Return each method with each number of workers, in the given order."""
        return [Cell(self, method, workers) for method in self.methods for workers in self.workers]

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON types, with a path relative to the working directory."""
        path = self.model_config
        return super().to_json() | {"model_config": None if path is None else _shorten(path)}


@dataclass(frozen=True)
class Cell:
    """A method with a number of workers: its tuning runs and its reported runs."""

    settings: CompareSettings
    method: str
    workers: int

    def tuning_runs(self) -> list[RunSettings]:
        """Return one run for each learning rate of the grid; none if there is nothing to tune.

        Raises:
            InvalidArgumentError: The settings do not make a run.
        """
        grid = self.grid()
        if len(grid) == 1:
            return []
        return [self._make_run(lr, TUNING_SEED, self.settings.tuning_steps) for lr in grid]

    def reported_runs(self, lr: float) -> list[RunSettings]:
        """Return one run for each reported seed.

        Raises:
            InvalidArgumentError: The settings do not make a run.
        """
        seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + self.settings.seeds)
        return [self._make_run(lr, seed, self.settings.steps) for seed in seeds]

    def grid(self) -> tuple[float, ...]:
        """Return the learning rates to try, in ascending order."""
        return make_grid(
            find_method(self.method).base_lr * self.settings.lr_scale,
            points=self.settings.lrs,
            factor=self.settings.lr_factor,
        )

    def _make_run(self, lr: float, seed: int, steps: int) -> RunSettings:
        given = self.settings
        weight_decay = given.weight_decay
        if weight_decay is None:
            weight_decay = find_method(self.method).weight_decay
        settings = given.shared() | {
            "method": self.method,
            "workers": self.workers,
            "seed": seed,
            "lr": lr,
            "weight_decay": weight_decay,
            "steps": steps,
            # A shorter run keeps the share of warm-up.
            "warmup_steps": round(given.warmup_steps * steps / given.steps),
        }
        return RunSettings(**settings)


def _shorten(path: Path) -> str:
    """Format a path relative to the working directory if it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def make_grid(base_lr: float, *, points: int, factor: float) -> tuple[float, ...]:
    """Spread learning rates evenly around one.

    Equation:
        lr_k = base_lr * factor^(k - (n - 1) / 2),  k = 0 .. n - 1
        n is ``points``; rounded to three digits. An even n leaves ``base_lr`` itself out.
    """
    middle = (points - 1) / 2
    return tuple(float(f"{base_lr * factor ** (k - middle):.3g}") for k in range(points))

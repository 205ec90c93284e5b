"""What is run, and in which order: the protocol of the study as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runs import RunConfig
from variants import VARIANTS

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


IMAGES = Setting("images", 1055, 128, 5, {"width": 16, "groups": 2})
WIDE = Setting("images", 3516, 128, 10, {"width": 24, "groups": 2})
TEXT = Setting("text", 1000, 64, 5, {"width": 64, "layers": 2, "heads": 4, "context": 64})

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

    @property
    def center(self) -> float:
        """The middle of the first three rates, where no other cell's rate is."""
        centers = CENTERS[self.setting.task]
        family = "shared" if self.method.startswith("shared-") else self.method
        return centers.get(family, centers["lion"])


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
        if not at_edge or len(rates) >= MOST_RATES:
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
    return [cell.config(rate, seed, is_tuning=False) for seed in SEEDS]


def list_open(cell: Cell, find: Find) -> list[RunConfig]:
    """Return the runs of a cell that can be done now and are not."""
    choice = choose_rate(cell, find)
    if choice.rate is None:
        return list(choice.wanted)
    return [run for run in reported(cell, choice.rate) if find(run.name) is None]


@dataclass(frozen=True)
class Part:
    """Cells that answer one question.

    Attributes:
        name: Of the part.
        title: For reports.
        cells: In the order in which they are run.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]


_FIRST = ("global-adamw", "global-lion", "majority", "shared-majority")
# Betas of (0.9, 0.95), the best of those that were tried by validation data, for each optimizer.
_SHORT = "majority-betas-90-95"
_SHORT_LION, _SHORT_ADAMW = "global-lion-betas-90-95", "global-adamw-betas-90-95"
_OTHERS = (
    "quantized-2",
    "average",
    "signum",
    "terngrad-adamw",
    "global-sgd",
    "dgc",
    "shared-average",
)


_EIGHT = (
    "majority",
    _SHORT,
    "quantized-2",
    "average",
    "signum",
    "terngrad-adamw",
    "dgc",
)


def _cell(setting: Setting, method: str, workers: int) -> Cell:
    """Return a cell; what sees only the mean gradient of alike workers does not depend on N."""
    is_global = method.startswith("global-")
    return Cell(
        setting,
        method,
        0 if is_global else workers,
        centered_on=_find_kin(setting, method, workers),
    )


def _find_kin(setting: Setting, method: str, workers: int) -> Cell | None:
    """Return the cell around whose best rate a method's grid begins; None for the first ones."""
    if method in (*_FIRST, "global-sgd"):
        return None
    kin = {
        "terngrad-adamw": "global-adamw",
        "dgc": "global-sgd",
        _SHORT_ADAMW: "global-adamw",
        _SHORT_LION: _SHORT,
    }.get(method)
    if kin is None and method.startswith("majority-betas-"):
        kin = "signum"
    if kin is None:
        kin = "shared-majority" if "shared-" in method else "majority"
    return _cell(setting, kin, workers)


def _cells(setting: Setting, methods: tuple[str, ...], workers: int) -> tuple[Cell, ...]:
    return tuple(_cell(setting, method, workers) for method in methods)


# What is compared with others, and whom it is said to be ahead of.
_TUNED_AGAIN = ("majority", _SHORT, "terngrad-adamw", "dgc")


def _more(setting: Setting, method: str, workers: int) -> Cell:
    """Return a cell of more than 4 workers.

    Some have a grid of their own, around their best rate with 4; the others have that rate.
    """
    cell, four = _cell(setting, method, workers), _cell(setting, method, 4)
    if cell == four:
        return cell
    if method in _TUNED_AGAIN:
        return replace(cell, centered_on=four)
    return replace(cell, centered_on=None, tuned_as=four)


def _skewed(method: str, alpha: float) -> Cell:
    base = method.partition("-sync")[0]
    return Cell(IMAGES, method, 8, alpha=alpha, tuned_as=_more(IMAGES, base, 8))


def _wide(method: str) -> Cell:
    return replace(_cell(WIDE, method, 4), tuned_as=_cell(IMAGES, method, 4))


def _attacked(method: str, attackers: int, factor: float) -> Cell:
    cell = Cell(IMAGES, method, 8, attackers=attackers, factor=factor)
    voted = "global-lion" if method == "median-lion" else method
    return replace(cell, tuned_as=_more(IMAGES, voted, 8))


_SKEWED = (
    "majority",
    "majority-sync-10",
    "quantized-2",
    _SHORT,
    "shared-majority",
    "global-lion",
    "global-adamw",
)
_MOST_SKEWED_ONLY = ("quantized-2", "shared-majority")
_ATTACKED = ("majority", _SHORT, "global-lion", "median-lion")

PARTS = (
    Part("images-4", "Images, 4 workers", _cells(IMAGES, _FIRST + _OTHERS, 4)),
    Part(
        "leads",
        "Images, 4 workers: variants of momentum after the vote, and of the majority vote",
        _cells(
            IMAGES,
            (
                "shared-quantized-2",
                "shared-majority-b95",
                "shared-majority-b80",
                "majority-betas-95-98",
                _SHORT,
                _SHORT_LION,
                _SHORT_ADAMW,
                "majority-betas-95-95",
                "majority-betas-80-80",
                "majority-full-vectors",
                "majority-betas-80-95",
                "majority-betas-90-97",
            ),
            4,
        ),
    ),
    Part(
        "text-4",
        "Text, 4 workers",
        _cells(TEXT, (*_FIRST, "signum", _SHORT, _SHORT_LION, _SHORT_ADAMW), 4),
    ),
    Part(
        "confirmation",
        "Images at higher accuracy, 4 workers",
        tuple(map(_wide, ("global-adamw", "majority", _SHORT))),
    ),
    Part("images-8", "Images, 8 workers", tuple(_more(IMAGES, method, 8) for method in _EIGHT)),
    Part(
        "skew",
        "Images, 8 workers whose classes are skewed",
        tuple(
            _skewed(method, alpha)
            for alpha in (0.1, 1.0)
            for method in _SKEWED
            if alpha < 1.0 or method not in _MOST_SKEWED_ONLY
        ),
    ),
    Part(
        "text-8",
        "Text, 8 workers; two bits with 4",
        (
            _more(TEXT, "majority", 8),
            _more(TEXT, _SHORT, 8),
            _cell(TEXT, "quantized-2", 4),
        ),
    ),
    Part(
        "norms",
        "Text, 4 workers: the scale of p bits, embeddings that may stay",
        _cells(
            TEXT,
            (
                "quantized-2-linf",
                "quantized-2-linf-full",
                "quantized-4-linf-full",
                "quantized-4",
                "majority-ternary-embeddings",
            ),
            4,
        ),
    ),
    Part(
        "images-32",
        "Images, 32 workers",
        tuple(_more(IMAGES, method, 32) for method in ("majority", "average", _SHORT)),
    ),
    Part(
        "byzantine",
        "Images, 8 workers, one or two of them Byzantine",
        tuple(
            _attacked(method, attackers, factor)
            for attackers, factor in ((1, -100.0), (2, -1.0))
            for method in _ATTACKED
        ),
    ),
    Part(
        "screen",
        "Text, 4 workers: majority votes that differ in one thing, by validation data",
        tuple(replace(_cell(TEXT, method, 4), is_screened=True) for method in VARIANTS),
    ),
)


def list_cells() -> Iterator[Cell]:
    """Yield all cells in the order of the protocol."""
    for part in PARTS:
        yield from part.cells

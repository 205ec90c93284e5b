"""Which cells are run, and in which order: the protocol as code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import study_path  # noqa: F401
from cells import Cell, Find, Setting, choose_rate, list_open
from runs import RunConfig
from settings import (
    ADAMW,
    ADAMW_CENTERS,
    ALPHA,
    CAUTIOUS,
    FACTORS,
    FEEDBACK,
    FEWER_SEEDS,
    LANGUAGE,
    MAJORITY,
    METHODS,
    ORTHOGONAL,
    SEEDS,
    SETTINGS,
    SHORT_LIST,
    SHOTS,
    TEXT_METHODS,
    VOTES,
)


@dataclass(frozen=True)
class FineCell(Cell):
    """A cell whose own center is AdamW's."""

    @property
    def center(self) -> float:
        """The middle of the first three rates of AdamW."""
        return ADAMW_CENTERS[self.setting.task]


def make_cell(
    setting: str, method: str, workers: int = 4, *, seeds: Sequence[int] = SEEDS
) -> FineCell:
    """Return a cell of even data.

    Methods that see only the mean gradient do not depend on the number of workers. The rates of all
    others begin around AdamW's best one; those of another setting or number of workers begin around
    the method's own, with all data and 4 workers.
    """
    sees_mean = method.startswith("global-")
    own: Setting = SETTINGS[setting]
    cell = FineCell(own, method, 0 if sees_mean else workers, seeds=tuple(seeds))
    if workers != 4 and not sees_mean:
        return replace(cell, centered_on=make_cell(setting, method))
    if setting != own.task:
        return replace(cell, centered_on=make_cell(own.task, method))
    return cell if method == ADAMW else replace(cell, centered_on=make_cell(setting, ADAMW))


@dataclass(frozen=True)
class Part:
    """Cells that answer one question.

    Attributes:
        name: Of the part.
        settings, methods, workers: Of its cells.
        seeds: Of its reported runs.
        alpha: Concentration of classes on workers; None: even.
        factors: Of AdamW's best rate, at which tuning runs are made and nothing is reported.
        device: Where its runs are made, as they all need the same one.
    """

    name: str
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    workers: int = 4
    seeds: tuple[int, ...] = SEEDS
    alpha: float | None = None
    factors: tuple[float, ...] = ()
    device: str = "cpu"

    def list_cells(self) -> list[Cell]:
        """Return its cells."""
        return [
            self.make_cell(setting, method) for setting in self.settings for method in self.methods
        ]

    def make_cell(self, setting: str, method: str) -> Cell:
        """Return one of its cells."""
        even = make_cell(setting, method, self.workers, seeds=self.seeds)
        if self.factors:
            return replace(even, is_screened=True)
        if self.alpha is None:
            return even
        # A mean of skewed workers depends on who they are.
        return replace(
            even, alpha=self.alpha, workers=self.workers, tuned_as=even, centered_on=None
        )

    def list_open(self, find: Find) -> Iterator[RunConfig]:
        """List the runs that can be made now and are not."""
        for cell in self.list_cells():
            yield from list_open(cell, find)
            if self.factors:
                tries = list_tries(cell, find, self.factors).values()
                yield from (run for run in tries if find(run.name) is None)


def list_tries(cell: Cell, find: Find, factors: Sequence[float]) -> dict[float, RunConfig]:
    """Return the tuning runs at factors of AdamW's best rate; none before it is chosen."""
    rate = choose_rate(make_cell(cell.setting.task, ADAMW), find).rate
    if rate is None:
        return {}
    return {factor: cell.tuning(float(f"{factor * rate:.4g}")) for factor in factors}


_FEW = tuple(f"spam-{shots}" for shots in SHOTS)
PARTS = (
    Part("f-spam", ("spam",), TEXT_METHODS),
    Part("f-brown", ("brown",), TEXT_METHODS),
    Part("f-images", ("images",), METHODS),
    Part("f-first-rate", ("spam", "brown", "images"), VOTES, factors=FACTORS),
    Part("f-spam-8", ("spam",), SHORT_LIST, workers=8, seeds=FEWER_SEEDS),
    Part("f-few", _FEW, SHORT_LIST, seeds=FEWER_SEEDS),
    Part("f-skew", ("spam", "brown"), SHORT_LIST, seeds=FEWER_SEEDS, alpha=ALPHA),
    Part(
        "f-others-8",
        ("brown", "images"),
        (ADAMW, CAUTIOUS, FEEDBACK),
        workers=8,
        seeds=FEWER_SEEDS,
    ),
    Part("f-novels", ("novels", "novels-lora"), (ADAMW, CAUTIOUS, MAJORITY), seeds=FEWER_SEEDS),
    Part(
        "f-novels-long",
        ("novels-long",),
        (*LANGUAGE, ORTHOGONAL),
        seeds=FEWER_SEEDS,
        device="cuda",
    ),
    Part("f-novels-lora", ("novels-long-lora",), LANGUAGE, seeds=FEWER_SEEDS, device="cuda"),
)
"""In the order of the protocol."""


def list_open_runs(parts: Sequence[Part], find: Find) -> list[RunConfig]:
    """Return what can be run now and has not been: by part, then by seed."""
    found: dict[str, RunConfig] = {}
    for part in parts:
        runs = sorted(part.list_open(find), key=lambda run: run.seed)
        found |= {run.name: run for run in runs}
    return list(found.values())

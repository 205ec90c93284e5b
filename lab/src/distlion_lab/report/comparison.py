"""The records of a comparison, read from its folder, and their summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from distlion.wire import LinkModel
from distlion_lab.errors import DataError
from distlion_lab.report.comparison_files import read_index, read_run

_RUNS = "runs"


@dataclass(frozen=True)
class Spread:
    """The mean and the spread of some values.

    Attributes:
        mean: Mean of the values.
        sd: Standard deviation of a sample, with n - 1; 0 for a single value.
        least, most: The extremes.
        count: Number of values, at least 1.
    """

    mean: float
    sd: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize one or more values."""
        sd = stdev(values) if len(values) > 1 else 0.0
        return cls(fmean(values), sd, min(values), max(values), len(values))


@dataclass(frozen=True)
class Metric:
    """The measure by which a task is judged.

    Attributes:
        name: Name with its unit, for axes and headings.
        column: Column of the series.
        scale, offset: Numbers that give the value ``offset + scale * column``.
        digits: Number of digits after the point.
    """

    name: str
    column: str
    scale: float = 1.0
    offset: float = 0.0
    digits: int = 4

    def read(self, record: dict[str, Any]) -> list[float]:
        """Return the values of a run, one for each evaluation."""
        return [self.offset + self.scale * value for value in record["series"][self.column]]


LOSS = Metric("test loss (nats per prediction)", "test_loss")
ACCURACY = Metric("test accuracy (%)", "test_accuracy", scale=100.0, digits=2)
ERROR = Metric("test error (%)", "test_accuracy", scale=-100.0, offset=100.0, digits=2)


@dataclass(frozen=True)
class Cell:
    """A method with a number of workers.

    Attributes:
        method: Name of the method.
        workers: Number of workers.
        grid: Tried learning rates, in ascending order.
        tuning: Records of the tuning runs, in the order of the grid; none if nothing was tuned.
        lr: Chosen learning rate; None if all diverged.
        records: Records of the reported runs, by seed.
    """

    method: str
    workers: int
    grid: tuple[float, ...]
    tuning: tuple[dict[str, Any], ...]
    lr: float | None
    records: tuple[dict[str, Any], ...]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Return the reported runs that did not diverge."""
        return [record for record in self.records if record["diverged"] is None]

    @property
    def diverged(self) -> int:
        """Return the number of reported runs that diverged."""
        return len(self.records) - len(self.finished)

    @property
    def is_at_edge(self) -> bool:
        """Return True if the chosen learning rate is the first or last of a grid of several."""
        return len(self.grid) > 1 and self.lr in (self.grid[0], self.grid[-1])

    def curve(self, metric: Metric) -> tuple[list[int], list[Spread]]:
        """Return steps with the spread over seeds at each of them; both empty if all diverged."""
        if not self.finished:
            return [], []
        values = [metric.read(record) for record in self.finished]
        steps = self.finished[0]["series"]["step"]
        return list(steps), [Spread.of(column) for column in zip(*values, strict=True)]

    def final(self, metric: Metric) -> Spread | None:
        """Return the spread over seeds after the last step; None if all diverged."""
        _, spreads = self.curve(metric)
        return spreads[-1] if spreads else None

    def mean_of(self, field: str) -> float:
        """Return the mean of a number over the finished runs; at least one must have finished."""
        return fmean(record[field] for record in self.finished)

    def sent_bytes(self) -> list[float]:
        """Return a worker's sent bytes at each evaluation, the mean of the finished runs."""
        columns = [record["series"]["sent_bytes"] for record in self.finished]
        return [fmean(column) for column in zip(*columns, strict=True)]

    def seconds(self, link: LinkModel, *, compute_s: float) -> list[float]:
        """Predict the seconds to each evaluation from the bytes sent so far, as in ``step_s``."""
        steps = self.finished[0]["series"]["step"] if self.finished else []
        rounds_s = self.mean_of("rounds") * link.latency_s if self.finished else 0.0
        return [
            step * (compute_s + rounds_s) + link.transfer_s(sent, sent)
            for step, sent in zip(steps, self.sent_bytes(), strict=True)
        ]

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits up and down for each parameter and step."""
        return self.mean_of("up_bits_per_parameter") + self.mean_of("down_bits_per_parameter")

    def step_s(self, link: LinkModel, *, compute_s: float) -> float:
        """Predict the seconds of a step.

        Equation:
            T = compute_s + rounds * latency_s + 8 * sent_bytes / rate_bit_per_s
            A worker receives as much as it sends, at the same time over a full-duplex link.
        """
        sent_bytes = self.mean_of("sent_bytes_per_step")
        exchange_s = self.mean_of("rounds") * link.latency_s
        return compute_s + exchange_s + link.transfer_s(sent_bytes, sent_bytes)


@dataclass(frozen=True)
class Comparison:
    """A comparison that has been run.

    Attributes:
        index: The content of ``comparison.json``.
        cells: All cells, in the order of methods, then workers.
    """

    index: dict[str, Any]
    cells: tuple[Cell, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the comparison."""
        settings: dict[str, Any] = self.index["settings"]
        return settings

    @property
    def methods(self) -> list[str]:
        """Return the names of the methods."""
        return list(self.settings["methods"])

    @property
    def workers(self) -> list[int]:
        """Return the numbers of workers."""
        return list(self.settings["workers"])

    def cell(self, method: str, workers: int) -> Cell:
        """Return the cell of a method with a number of workers."""
        (cell,) = (c for c in self.cells if (c.method, c.workers) == (method, workers))
        return cell

    @property
    def is_classification(self) -> bool:
        """Return True if the error matters, not the loss."""
        return bool(self.settings["task"] == "images")

    @property
    def course(self) -> Metric:
        """Return the metric to draw over steps."""
        return ACCURACY if self.is_classification else LOSS

    @property
    def outcome(self) -> Metric:
        """Return the metric that judges methods in the end; lower is better."""
        return ERROR if self.is_classification else LOSS

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Return the records of all runs, tuning included."""
        return [record for cell in self.cells for record in (*cell.tuning, *cell.records)]

    @cached_property
    def compute_s(self) -> float:
        """Return the median, over all runs, of one worker's seconds of forward and backward."""
        seconds = [record["timing"]["compute_s"] for record in self.records]
        return float(median([each for each in seconds if each is not None] or [math.nan]))


def read_comparison(folder: Path) -> Comparison:
    """Read the results of ``distlion compare`` from a folder.

    Raises:
        DataError: The index or a record is missing or cannot be used.
    """
    index = read_index(folder)
    cells = tuple(_read_cell(cell, folder / _RUNS) for cell in index["cells"])
    for cell in cells:
        _check_steps(cell)
    return Comparison(index, cells)


def _read_cell(cell: dict[str, Any], folder: Path) -> Cell:
    return Cell(
        method=cell["method"],
        workers=cell["workers"],
        grid=tuple(cell["grid"]),
        tuning=tuple(read_run(folder / each["run"]) for each in cell["tuning"]),
        lr=cell["lr"],
        records=tuple(read_run(folder / name) for name in cell["runs"]),
    )


def _check_steps(cell: Cell) -> None:
    """Check that the runs of an average were evaluated after the same steps."""
    if any(
        record["series"]["step"] != cell.finished[0]["series"]["step"] for record in cell.finished
    ):
        raise DataError(
            f"runs of {cell.method} with {cell.workers} workers were evaluated at different steps; "
            "run distlion compare again with another --out"
        )

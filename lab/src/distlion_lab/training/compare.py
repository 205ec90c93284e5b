"""Compare methods: tune all on equal grids, run the reported seeds, keep a record of each run."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from distlion_lab.tasks.base import Task
from distlion_lab.training.compare_settings import TUNING_SEED, Cell, CompareSettings
from distlion_lab.training.local_workers import Emit
from distlion_lab.training.methods import find_method
from distlion_lab.training.pool import Finished, Pool
from distlion_lab.training.record import write_whole
from distlion_lab.training.run import list_slow_imports, load_task
from distlion_lab.training.run_record import RecordFolder
from distlion_lab.training.run_settings import RunSettings
from distlion_lab.training.train_settings import TrainSettings
from distlion_lab.training.virtual_loop import VirtualLoop, split_heldout

INDEX_NAME = "comparison.json"
RUNS_NAME = "runs"
FORMAT = 1
_EMIT_EVERY_S = 0.5


@dataclass(frozen=True)
class CompareProgress:
    """Progress of a comparison.

    Attributes:
        done_runs, total_runs: Runs of this call; runs that were there before are in neither.
        done_share: Share of their work that is done, 0 to 1.
        what: The run that reported last.
        seconds_left: Estimated seconds; None before there is an estimate.
    """

    done_runs: int
    total_runs: int
    done_share: float
    what: str
    seconds_left: float | None


CompareObserver = Callable[[CompareProgress], None]


def compare(
    settings: CompareSettings,
    *,
    folder: Path,
    jobs: int,
    command: str,
    observe: CompareObserver,
) -> dict[str, Any]:
    """Do the runs that are not in the folder yet, and write the index of the comparison.

    Args:
        settings: Settings of the comparison.
        folder: Folder for ``runs/``, with one record for each run, and ``comparison.json``.
        jobs: Runs at the same time, each in a process with one thread; at least 1.
        command: Command that repeats the comparison, for the report.
        observe: Called with progress, in the process that calls this function.

    Returns:
        The content of ``comparison.json``: ``settings``, ``command``, ``tuning_seed``, ``methods``
        (name -> ``description``, ``definition``, ``kind``, ``weight_decay``), and ``cells``. A cell
        has, for each ``method`` and number of ``workers``, the ``grid`` of learning rates, the
        ``tuning`` (``lr``, ``run``), the chosen ``lr`` (null if all diverged) and the reported
        ``runs``, as names of files in ``runs/``.

    Raises:
        DataError: Data or model config cannot be used, or the folder cannot be written.
        InvalidArgumentError: ``jobs`` is below 1.
        WorkerFailedError: A run failed for a reason other than divergence.
    """
    if jobs < 1:
        raise InvalidArgumentError(f"jobs is {jobs}; expected 1 or more")
    largest = max(settings.cells(), key=lambda cell: cell.workers).reported_runs(1e-3)[0]
    task = load_task(largest.to_training())  # so that a mistake shows before any run
    split_heldout(task)
    records = RecordFolder(folder / RUNS_NAME, task.describe())
    preload = [__name__, *list_slow_imports(largest.to_training(), task)]
    with Pool(_work, size=jobs, preload=preload) as pool:
        cells = _Comparison(settings, records, folder / RUNS_NAME, pool, observe).run()
    index = {
        "format": FORMAT,
        "settings": settings.to_json(),
        "command": command,
        "tuning_seed": TUNING_SEED,
        "methods": {name: _describe(settings, name) for name in settings.methods},
        "cells": cells,
    }
    try:
        write_whole(folder / INDEX_NAME, json.dumps(index, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise DataError(
            f"{str(folder / INDEX_NAME)!r} cannot be written: {error.strerror}. All runs have "
            "records there: make room, and run distlion compare again"
        ) from error
    return index


def choose_lr(tuning: Sequence[tuple[float, dict[str, Any]]]) -> float | None:
    """Choose the learning rate with the lowest final validation loss; the lowest of equal ones.

    Args:
        tuning: Learning rates with the records of their runs.

    Returns:
        The learning rate; None where all runs diverged.
    """
    losses = {
        lr: record["series"]["validation_loss"][-1]
        for lr, record in tuning
        if record["diverged"] is None
    }
    return min(losses, key=lambda lr: (losses[lr], lr), default=None)


@dataclass(frozen=True)
class _Job:
    run: RunSettings
    folder: Path

    def __str__(self) -> str:
        return f"the run of {self.run}"


def _work(emit: Emit, job: _Job) -> None:
    """Do one run in a process of the pool, and write its record."""
    torch.set_num_threads(1)
    due_s = time.monotonic()

    def report(step: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _EMIT_EVERY_S
            emit(step)

    task = _load_task(job.run.to_data())
    record = VirtualLoop(job.run, task, report).run()
    RecordFolder(job.folder, task.describe()).write(job.run, record)


@functools.lru_cache(maxsize=1)
def _load_task(settings: TrainSettings) -> Task:
    return load_task(settings)


@dataclass
class _CellState:
    """State of a cell: ``waiting`` runs, then the choice, then waiting runs again."""

    cell: Cell
    waiting: set[RunSettings] = field(default_factory=set)
    lr: float | None = None
    is_tuned: bool = False

    @property
    def expected(self) -> list[RunSettings]:
        """Runs that will follow, as far as they are known."""
        return [] if self.is_tuned else self.cell.reported_runs(1e-3)


class _Comparison:
    """The runs of one call, including runs that wait for a choice."""

    def __init__(
        self,
        settings: CompareSettings,
        records: RecordFolder,
        folder: Path,
        pool: Pool,
        observe: CompareObserver,
    ) -> None:
        self._records = records
        self._folder = folder
        self._pool = pool
        self._observe = observe
        self._states = [_CellState(cell) for cell in settings.cells()]
        self._running: dict[RunSettings, int] = {}
        self._finished: list[RunSettings] = []
        self._start_s = time.monotonic()

    def run(self) -> list[dict[str, Any]]:
        """Do all runs that are missing; return the cells of the index."""
        # The longest run first, so that no process is left with one at the end.
        for state in sorted(self._states, key=lambda state: -state.cell.workers):
            self._want(state, state.cell.tuning_runs())
        self._report("starting")
        for event in self._pool.events():
            run = event.job.run
            if isinstance(event, Finished):
                self._finish(run)
            else:
                self._running[run] = event.content * run.workers
            self._report(str(run))
        return [self._describe(state) for state in self._states]

    def _want(self, state: _CellState, runs: Sequence[RunSettings]) -> None:
        """Submit runs without a record; advance the cell if all of them have one."""
        missing = [run for run in runs if self._records.read(run) is None]
        state.waiting = set(missing)
        for run in missing:
            self._running[run] = 0
            self._pool.submit(_Job(run, self._folder))
        if not missing:
            self._advance(state)

    def _finish(self, run: RunSettings) -> None:
        del self._running[run]
        self._finished.append(run)
        (state,) = (state for state in self._states if run in state.waiting)
        state.waiting.remove(run)
        if not state.waiting:
            self._advance(state)

    def _advance(self, state: _CellState) -> None:
        """Choose the learning rate of a tuned cell, and submit its reported runs."""
        if state.is_tuned:
            return
        state.is_tuned = True
        tuning = [(run.lr, self._read(run)) for run in state.cell.tuning_runs()]
        state.lr = choose_lr(tuning) if tuning else state.cell.grid()[0]
        if state.lr is not None:
            self._want(state, state.cell.reported_runs(state.lr))

    def _read(self, run: RunSettings) -> dict[str, Any]:
        record = self._records.read(run)
        assert record is not None  # it was there, or has just been written
        return record

    def _report(self, what: str) -> None:
        expected = [run for state in self._states for run in state.expected]
        done = sum(run.work for run in self._finished) + sum(self._running.values())
        total = sum(run.work for run in [*self._finished, *self._running, *expected])
        elapsed_s = time.monotonic() - self._start_s
        self._observe(
            CompareProgress(
                done_runs=len(self._finished),
                total_runs=len(self._finished) + len(self._running) + len(expected),
                done_share=done / total if total else 1.0,
                what=what,
                seconds_left=elapsed_s * (total - done) / done if done else None,
            )
        )

    def _describe(self, state: _CellState) -> dict[str, Any]:
        cell = state.cell
        reported = [] if state.lr is None else cell.reported_runs(state.lr)
        return {
            "method": cell.method,
            "workers": cell.workers,
            "grid": list(cell.grid()),
            "tuning": [
                {"lr": run.lr, "run": self._records.path(run).name} for run in cell.tuning_runs()
            ],
            "lr": state.lr,
            "runs": [self._records.path(run).name for run in reported],
        }


def _describe(settings: CompareSettings, name: str) -> dict[str, Any]:
    method = find_method(name)
    own = settings.weight_decay is None
    return {
        "description": method.description,
        "definition": method.definition,
        "kind": method.kind.value,
        "weight_decay": method.weight_decay if own else settings.weight_decay,
    }

"""Live progress: a bar on a terminal, otherwise a plain line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from distlion_lab.training.loop import Progress

_PLAIN_EVERY_S = 10.0
# On a terminal, throughput is the mean over this many seconds of steps.
_INTERVAL_S = 2.0
_MEGABYTE = 1_000_000
_Self = TypeVar("_Self", bound="LiveDisplay")


class LiveDisplay:
    """A context manager that shows the progress of one task.

    Args:
        console: Where to show it; a bar needs a terminal.
        columns: Columns of the bar.
        expand: True if the bar takes the whole width.
        fields: Initial values of the columns.
    """

    def __init__(
        self, console: Console, *columns: ProgressColumn, expand: bool = False, **fields: Any
    ) -> None:
        self._console = console
        self._plain_due_s = 0.0
        self._bar = Bar(*columns, console=console, expand=expand)
        self._task = self._bar.add_task(**{"description": "", "total": None, **fields})

    def __enter__(self: _Self) -> _Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def show(self, line: str, *, at_once: bool = False, **fields: Any) -> bool:
        """Show the progress of the task; return True if a line was written.

        Args:
            line: Line in place of a bar; left out if the last one was shown just now.
            at_once: True to show the line all the same.
            fields: Fields of the bar.
        """
        if self._console.is_terminal:
            self._bar.update(self._task, **fields)
            return False
        if at_once or time.monotonic() >= self._plain_due_s:
            self._plain_due_s = time.monotonic() + _PLAIN_EVERY_S
            self._console.print(Text(line), soft_wrap=True)
            return True
        return False


class _Throughput:
    """Throughput of all workers in the steps of the last interval; its ``str`` is shown.

    Args:
        each_s: Shortest interval that counts, in seconds of steps; the first one always counts.
    """

    def __init__(self, *, each_s: float) -> None:
        self._each_s = each_s
        self._units, self._training_s = 0, 0.0
        self._text = ""

    def __str__(self) -> str:
        return self._text

    def begin(self, progress: Progress) -> None:
        """Begin an interval."""
        self._units, self._training_s = progress.units, progress.training_s

    def update(self, progress: Progress) -> bool:
        """Measure from the beginning of the interval; return True if it is long enough."""
        interval_s = progress.training_s - self._training_s
        is_long = interval_s > 0 and interval_s >= self._each_s
        if is_long or (interval_s > 0 and not self._text):
            self._text = f"{(progress.units - self._units) / interval_s:,.0f} {progress.unit}/s"
        return is_long


class ProgressDisplay(LiveDisplay):
    """Show the progress of one run; called with each ``Progress``.

    Args:
        console: Where to show it.
        workers: Number of workers, for the line that reports their start.
    """

    def __init__(self, console: Console, *, workers: int) -> None:
        self._starting = f"starting {workers} workers"
        self._validation, self._validated_step = "", 0
        self._throughput = _Throughput(each_s=_INTERVAL_S if console.is_terminal else 0.0)
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            expand=True,
            description="checking",
        )

    def announce(self) -> None:
        """Announce the start of workers, after all checks that can refuse the run."""
        self.show(self._starting, at_once=True, description=self._starting)

    def __call__(self, progress: Progress) -> None:
        """Show the run's progress."""
        if progress.note:
            self.tell(progress.note)
        if progress.validation_loss is not None:
            self._validation = f"validation {progress.validation_loss:.4f}"
            self._validated_step = progress.step
        # On a terminal the mean of some seconds, in a file of all steps since the last line.
        is_over = self._throughput.update(progress) and self._console.is_terminal
        what = self._describe(progress)
        is_written = self.show(
            f"step {progress.step}/{progress.steps}  {what}",
            at_once=progress.validation_loss is not None,
            completed=progress.step,
            total=progress.steps,
            description=what,
        )
        if is_written or is_over:
            self._throughput.begin(progress)

    def _describe(self, progress: Progress) -> str:
        validation = self._validation
        if validation and progress.step != self._validated_step:
            validation += f" (step {self._validated_step})"
        if progress.train_loss is None:
            return validation
        members = f"{progress.members}  " if progress.members else ""
        return (
            f"{members}loss {progress.train_loss:.4f}  {validation}  "
            f"{self._throughput}  "
            f"{progress.sent_bytes / _MEGABYTE:.2f} MB sent  "
            f"{progress.bits_per_parameter:.2f} bits/parameter"
        )

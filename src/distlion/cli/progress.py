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

from distlion.training import Progress

_PLAIN_EVERY_S = 10.0
_MEGABYTE = 1_000_000
_Self = TypeVar("_Self", bound="LiveDisplay")


class LiveDisplay:
    """Show one task while it goes on; a context manager.

    Args:
        console: Where to show it; a bar needs a terminal.
        columns: Of the bar.
        expand: Whether the bar takes the whole width.
        fields: What the columns show at first.
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
        """Show a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def show(self, line: str, *, at_once: bool = False, **fields: Any) -> None:
        """Show where the task is.

        Args:
            line: In place of a bar; left out if the last one was shown just now.
            at_once: Show it all the same.
            fields: Of the bar.
        """
        if self._console.is_terminal:
            self._bar.update(self._task, **fields)
        elif at_once or time.monotonic() >= self._plain_due_s:
            self._plain_due_s = time.monotonic() + _PLAIN_EVERY_S
            self._console.print(Text(line), soft_wrap=True)


class ProgressDisplay(LiveDisplay):
    """Show the progress of one run; it is called with each ``Progress``.

    Args:
        console: Where to show it.
        workers: Number of workers, for the line that reports their start.
    """

    def __init__(self, console: Console, *, workers: int) -> None:
        self._starting = f"starting {workers} workers"
        self._validation = ""
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            expand=True,
            description=self._starting,
        )

    def __enter__(self) -> ProgressDisplay:
        super().__enter__()
        if not self._console.is_terminal:
            self._console.print(self._starting)
        return self

    def __call__(self, progress: Progress) -> None:
        """Show where the run is."""
        if progress.note:
            self.tell(progress.note)
        if progress.validation_loss is not None:
            self._validation = f"validation {progress.validation_loss:.4f}"
        what = self._describe(progress)
        self.show(
            f"step {progress.step}/{progress.steps}  {what}",
            at_once=progress.validation_loss is not None,
            completed=progress.step,
            total=progress.steps,
            description=what,
        )

    def _describe(self, progress: Progress) -> str:
        if progress.train_loss is None:
            return self._validation
        return (
            f"loss {progress.train_loss:.4f}  {self._validation}  "
            f"{progress.units_per_s:,.0f} {progress.unit}/s  "
            f"{progress.sent_bytes / _MEGABYTE:.2f} MB sent  "
            f"{progress.bits_per_parameter:.2f} bits/parameter"
        )

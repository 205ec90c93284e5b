"""Live progress of a run: a bar on a terminal, otherwise a plain line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from distlion.training import Progress

_PLAIN_EVERY_S = 10.0
_MEGABYTE = 1_000_000


class ProgressDisplay:
    """Show the progress of one run; a context manager that is called with each ``Progress``.

    Args:
        console: Where to show it; a bar needs a terminal.
        workers: Number of workers, for the line that tells of their start.
    """

    def __init__(self, console: Console, *, workers: int) -> None:
        self._console = console
        self._workers = workers
        self._heldout = ""
        self._plain_due_s = 0.0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._run = self._bar.add_task(f"starting {workers} workers", total=None)

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._console.print(f"starting {self._workers} workers")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show where the run is."""
        if progress.heldout_loss is not None:
            self._heldout = f"held out {progress.heldout_loss:.4f}"
        if self._console.is_terminal:
            self._bar.update(
                self._run,
                completed=progress.step,
                total=progress.steps,
                description=self._describe(progress),
            )
        elif progress.heldout_loss is not None or time.monotonic() >= self._plain_due_s:
            self._plain_due_s = time.monotonic() + _PLAIN_EVERY_S
            line = f"step {progress.step}/{progress.steps}  {self._describe(progress)}"
            self._console.print(Text(line), soft_wrap=True)

    def _describe(self, progress: Progress) -> str:
        if progress.train_loss is None:
            return self._heldout
        return (
            f"loss {progress.train_loss:.4f}  {self._heldout}  "
            f"{progress.units_per_s:,.0f} {progress.unit}/s  "
            f"{progress.sent_bytes / _MEGABYTE:.2f} MB sent  "
            f"{progress.bits_per_parameter:.2f} bits/parameter"
        )

"""Errors as users see them: one clear message and an exit status, no traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from distlion.errors import DistlionError, WorkerFailedError
from distlion.training import torchrun_world_size

_FAILED = 1
_INTERRUPTED = 130


@contextlib.contextmanager
def shown_failures(console: Console) -> Iterator[None]:
    """Turn distlion's errors and Ctrl-C into a message and an exit status, 1 or 130.

    Any other exception is a bug and keeps its traceback; so does one that broke a worker.
    """
    try:
        yield
    except DistlionError as error:
        # Any other cause is in the message already.
        if isinstance(error, WorkerFailedError) and error.__cause__ is not None:
            console.print(Text(str(error.__cause__).strip()))
        _show(console, f"{type(error).__name__}: {error}")
        raise typer.Exit(_FAILED) from None
    except KeyboardInterrupt:
        _show(console, "interrupted; all workers have ended")
        raise typer.Exit(_INTERRUPTED) from None


def leave(status: int) -> NoReturn:
    """End this process at once: what was written is flushed, no cleanup of the interpreter runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave_torchrun() -> None:
    """End a worker of torchrun at once, its work done; any other process goes on.

    A thread of Gloo may still have to free a tensor, which aborts a process whose interpreter is
    shutting down; torch keeps these threads even after destroy_process_group.
    """
    if torchrun_world_size() is not None:
        leave(0)


def _show(console: Console, message: str) -> None:
    if console.is_terminal:
        console.print(Panel(Text(message), title="distlion", title_align="left", style="red"))
    else:
        console.print(Text(f"distlion: {message}"), soft_wrap=True)

"""Errors for users: one clear line and an exit status, no traceback."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from distlion.command_line import FAILED, INTERRUPTED, MISUSED
from distlion.errors import DistlionError, InvalidArgumentError, PeerLostError, StepError
from distlion_lab.errors import WorkerFailedError
from distlion_lab.training.train_settings import torchrun_world_size

# Names of arguments in the library, where the option has another name.
_ALIASES = {
    "n_params": "params",
    "n_elements": "vector",
    "latency_s": "latency_us",
    "message_s": "message_us",
    "step_timeout_s": "step_timeout",
    "keep": "keep_checkpoints",
    "rates": "rate",
    "method": "methods",
    "methods": "method",
}
_options: ContextVar[Mapping[str, str]] = ContextVar("_options", default=MappingProxyType({}))


@contextlib.contextmanager
def named_options(options: Mapping[str, str]) -> Iterator[None]:
    """Make refusals name the options of a command.

    Args:
        options: Options by the name of the argument, such as ``compute_s``: ``--compute-s``.
    """
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


@contextlib.contextmanager
def refusing(option: str) -> Iterator[None]:
    """Put the option in front of a message about its value."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{option}: {error}") from error


@contextlib.contextmanager
def shown_failures(console: Console) -> Iterator[None]:
    """Turn distlion's errors and Ctrl-C into one line and an exit status.

    The status is 2 if the command line is wrong, 1 if the work failed, 130 after Ctrl-C.

    If torchrun or the network lab started the workers, one of them reports an error that all know.
    The first one of each host reports a refusal: its cause may be on that host alone.
    Any other exception is a bug and keeps its traceback, also if it broke a worker.
    """
    try:
        yield
    except InvalidArgumentError as error:
        if _is_first_of_host():
            show_message(console, _name_option(str(error)))
        raise typer.Exit(MISUSED) from None
    except DistlionError as error:
        # The message already has any other cause.
        if isinstance(error, WorkerFailedError) and error.__cause__ is not None:
            console.print(Text(str(error.__cause__).strip()))
        if _tells(error):
            show_message(console, f"{type(error).__name__}: {error}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        if is_first_rank():
            show_message(console, "interrupted; all workers have ended")
        raise typer.Exit(INTERRUPTED) from None


def is_first_rank() -> bool:
    """Return True for torchrun's first worker, and for a process that is none of them."""
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return not (rank.isdecimal() and world_size) or int(rank) == 0


def _is_first_of_host() -> bool:
    """Return True for torchrun's first worker on each host, and for a process that is none.

    A launcher that sets no LOCAL_RANK leaves the first worker of all.
    """
    return is_first_rank() or os.environ.get("LOCAL_RANK") == "0"


def show_message(console: Console, message: str) -> None:
    """Print a line that no terminal width breaks, so that it can be searched and copied."""
    console.print(Text(f"distlion: {message}", style="red"), soft_wrap=True)


def leave(status: int) -> NoReturn:
    """End this process at once: output is flushed, but no cleanup of the interpreter runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave_torchrun() -> None:
    """End a worker of torchrun at once after its work; any other process goes on.

    A thread of Gloo may still have to free a tensor, which would abort a process while its
    interpreter shuts down. torch keeps these threads even after destroy_process_group.
    """
    if torchrun_world_size() is not None:
        leave(0)


def _tells(error: DistlionError) -> bool:
    """Return True if this rank reports the error: the first one alive, if all ranks know it."""
    if is_first_rank() or not isinstance(error, StepError) or not error.culprits:
        return True
    if not isinstance(error, PeerLostError):
        return False
    rank = int(os.environ["RANK"])
    return rank not in error.culprits and all(other in error.culprits for other in range(rank))


def _name_option(message: str) -> str:
    """Replace the argument at the beginning of a message by its option.

    ``compute_s is 0`` becomes ``--compute-s is 0``. For an argument of a class, as in
    ``LinkModel(latency_s=-1)``, the option is put in front.
    """
    match = re.match(r"(?:(?P<argument>\w+)\b(?!\()|\w+\((?P<field>\w+)=)", message)
    if match is None:
        return message
    name = match["argument"] or match["field"]
    options = _options.get()
    option = options.get(name) or options.get(_ALIASES.get(name, ""))
    if option is None:
        return message
    return f"{option}{message[match.end() :]}" if match["argument"] else f"{option}: {message}"

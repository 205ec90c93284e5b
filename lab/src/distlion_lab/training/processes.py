"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from distlion.errors import CrewError, DistlionError
from distlion.signals import deferred_signals
from distlion_lab.errors import WorkerFailedError

_TERMINATE_S = 2.0
# A closed terminal sends SIGHUP, which Windows does not have.
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class WorkerTraceError(Exception):
    """The traceback of a worker's unexpected exception, as text; the cause of WorkerFailedError."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An exception of a child process, for its parent.

    Attributes:
        description: Class and message.
        trace: Traceback of an unexpected exception; None for an error of distlion.
        is_of_crew: True for an error that may end one worker of a crew, but not the others.
        time_ns: The machine's monotonic clock, one for all processes.
    """

    description: str
    trace: str | None
    is_of_crew: bool
    time_ns: int

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe the exception that is being handled."""
        trace = None if isinstance(error, DistlionError) else traceback.format_exc()
        description = f"{type(error).__name__}: {error}"
        return cls(description, trace, isinstance(error, CrewError), time.monotonic_ns())

    def raise_as(self, what: str) -> NoReturn:
        """Raise the failure of what failed.

        Raises:
            WorkerFailedError: Always.
        """
        cause = WorkerTraceError(self.trace) if self.trace else None
        raise WorkerFailedError(f"{what} failed: {self.description}") from cause


def choose_context(preload: Sequence[str]) -> Any:
    """Return a context that forks workers from a server with these modules, or else spawns them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with _sigint_blocked(), deferred_signals("the start of a process", gives_way=False):
        forkserver.ensure_running()
    return context


@deferred_signals("the start of a process", gives_way=False)
def start_process(process: BaseProcess) -> None:
    """Start a process that ``end_processes`` will end; signals wait until it has started.

    An interrupted start may leave a process of unknown number. The first start takes as long as
    the fork server needs to import the preloaded modules; later ones are much shorter.
    """
    process.start()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in children: Ctrl-C goes to the whole terminal, but the parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_child() -> None:
    """Leave Ctrl-C to the parent, and end at once when the parent is gone, however it ended.

    To be called first in a child process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@deferred_signals("the end of processes", gives_way=False)
def end_processes(processes: Sequence[BaseProcess]) -> None:
    """End all running processes by SIGTERM, and soon by SIGKILL; no signal interrupts this."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    deadline_s = time.monotonic() + _TERMINATE_S
    for process in started:
        process.join(max(0.0, deadline_s - time.monotonic()))
        process.kill()
        process.join()


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave ``with`` blocks in order, by SystemExit with 143 and 129.

    Signals that other code handles, or ignores as ``nohup`` does, stay as they are. Signals belong
    to the main thread; in other threads nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    owner_pid = os.getpid()

    def leave(number: int, frame: object) -> None:
        # A forked child, such as pyroute2's, has no blocks to leave.
        if os.getpid() != owner_pid:
            os._exit(128 + number)
        # Only once: a second signal must not interrupt the clean-up.
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if not is_main:
        numbers = []
    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def describe_exit(exitcode: int | None) -> str:
    """Describe the end of a process."""
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"

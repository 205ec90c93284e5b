"""A pool of processes for long jobs that report their progress."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from distlion_lab.errors import WorkerFailedError
from distlion_lab.training.local_workers import Emit
from distlion_lab.training.processes import (
    Failure,
    become_child,
    choose_context,
    describe_exit,
    end_processes,
    leaving_in_order,
    start_process,
)


@dataclass(frozen=True)
class Reported:
    """A value that a job emitted before its end."""

    job: Any
    content: Any


@dataclass(frozen=True)
class Finished:
    """The value that a job returned."""

    job: Any
    result: Any


@dataclass
class _Seat:
    """One process of the pool, with its job; None while it is idle."""

    process: BaseProcess
    pipe: Connection
    job: Any = None


class Pool:
    """Do jobs in child processes, in the order in which they were submitted.

    This is a context manager. All processes have ended when it is left, also by Ctrl-C, SIGTERM
    and SIGHUP. If this process is killed, they end themselves.

    Args:
        work: Called in a child as ``work(emit, job)``; must be importable by name. Jobs, results
            and emitted values must be picklable.
        size: Number of processes, at least 1; they start when there is work.
        preload: Modules to import once, before processes are forked.
    """

    def __init__(
        self, work: Callable[[Emit, Any], Any], *, size: int, preload: Sequence[str] = ()
    ) -> None:
        self._work = work
        self._size = size
        self._preload = preload
        self._seats: list[_Seat] = []
        self._waiting: deque[Any] = deque()
        self._numbers = itertools.count()
        self._signals = leaving_in_order()

    def __enter__(self) -> Pool:
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_processes([seat.process for seat in self._seats])
        for seat in self._seats:
            seat.pipe.close()
        self._signals.__exit__(None, None, None)

    def submit(self, job: Any) -> None:
        """Add a job to the waiting ones."""
        self._waiting.append(job)

    def events(self) -> Iterator[Reported | Finished]:
        """Do all jobs, including jobs submitted meanwhile.

        Raises:
            WorkerFailedError: A job raised, or its process died.
        """
        self._assign()
        while busy := [seat for seat in self._seats if seat.job is not None]:
            sources = {seat.pipe: seat for seat in busy}
            sentinels = {seat.process.sentinel: seat for seat in busy}
            ready = connection.wait([*sources, *sentinels])
            spoken = [seat for pipe, seat in sources.items() if pipe in ready]
            for seat in spoken:
                yield from self._hear(seat)
            for sentinel, seat in sentinels.items():
                if sentinel in ready and seat not in spoken:
                    self._mourn(seat)
            self._assign()

    def _assign(self) -> None:
        """Give waiting jobs to idle processes, and start as many processes as are needed."""
        while self._waiting:
            idle = [seat for seat in self._seats if seat.job is None]
            if not idle and len(self._seats) == self._size:
                return
            seat = idle[0] if idle else self._start()
            seat.job = self._waiting.popleft()
            try:
                seat.pipe.send(seat.job)
            except OSError:  # it died while it had nothing to do
                self._mourn(seat)

    def _start(self) -> _Seat:
        context = choose_context(self._preload)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, self._work),
            name=f"distlion pool {next(self._numbers)}",
            daemon=True,
        )
        self._seats.append(_Seat(process, ours))
        start_process(process)
        # Our copy must be closed, or the pipe would never come to its end.
        theirs.close()
        return self._seats[-1]

    def _hear(self, seat: _Seat) -> Iterator[Reported | Finished]:
        try:
            message = seat.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._mourn(seat)
            return
        if isinstance(message, Reported):
            yield message
        elif isinstance(message, Finished):
            seat.job = None
            yield message
        else:
            assert isinstance(message, Failure)
            message.raise_as(str(seat.job))

    def _mourn(self, seat: _Seat) -> None:
        seat.process.join()
        raise WorkerFailedError(f"the process of {seat.job} {describe_exit(seat.process.exitcode)}")


def _serve(pipe: Connection, work: Callable[[Emit, Any], Any]) -> None:
    """Do one job after the other until the parent closes the pipe."""
    become_child()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            result = work(partial(_report, pipe, job), job)
        # The parent reports any exception.
        except Exception as error:  # noqa: BLE001
            pipe.send(Failure.of(error))
        else:
            pipe.send(Finished(job, result))


def _report(pipe: Connection, job: Any, content: Any) -> None:
    pipe.send(Reported(job, content))

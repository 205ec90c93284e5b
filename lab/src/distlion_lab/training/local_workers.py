"""Local workers: start them, listen to them, and leave none behind."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlion_lab.errors import WorkerFailedError
from distlion_lab.training.network import Enter
from distlion_lab.training.processes import (
    Failure,
    become_child,
    choose_context,
    describe_exit,
    end_processes,
    leaving_in_order,
    start_process,
)

# A worker that loses a peer reports within milliseconds, sometimes before the operating system
# reports the death that caused it. Before a report is believed, wait this long for such news.
_BLAME_WINDOW_S = 1.0

Emit = Callable[[Any], None]


@dataclass(frozen=True)
class _Event:
    content: Any


@dataclass(frozen=True)
class _Result:
    content: Any


def run_workers(
    work: Callable[..., Any],
    *args: Any,
    world_size: int,
    observe: Emit,
    preload: Sequence[str] = (),
    enter: Enter | None = None,
) -> Any:
    """Run a function in local worker processes that form a Gloo process group.

    Workers find each other through a file, so we open no port. They talk over the loopback
    interface unless ``GLOO_SOCKET_IFNAME`` names another. All workers have ended when this function
    is left, by a result, an error, Ctrl-C, SIGTERM or SIGHUP. If this process is killed, they end
    themselves.

    Args:
        work: Called as ``work(emit, *args)`` on every rank with the default group initialized; must
            be importable by name. Values that rank 0 passes to ``emit`` reach ``observe`` here.
        args: Further arguments of ``work``; they are pickled.
        world_size: Number of workers.
        observe: Called here with the values that rank 0 emits.
        preload: Modules to import once, before workers are forked, instead of in each worker.
        enter: Puts each worker on a host of an emulated network; None leaves all on this machine.

    Returns:
        The value that ``work`` returned on rank 0.

    Raises:
        WorkerFailedError: A worker died or raised; the message names it. All others are ended.
    """
    with leaving_in_order(), tempfile.TemporaryDirectory(prefix="distlion-") as folder:
        team = _Team(world_size)
        try:
            team.start(work, args, Path(folder) / "rendezvous", preload, enter)
            return team.listen(observe)
        finally:
            team.end()


class _Team:
    """The workers of one run, as their parent sees them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[BaseProcess] = []
        self._inboxes: dict[Connection, int] = {}
        self._failures: dict[int, Failure] = {}
        self._result: _Result | None = None

    def start(
        self,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        rendezvous: Path,
        preload: Sequence[str],
        enter: Enter | None,
    ) -> None:
        context = choose_context(preload)
        for rank in range(self._world_size):
            inbox, outbox = context.Pipe(duplex=False)
            self._inboxes[inbox] = rank
            process = context.Process(
                target=_run_worker,
                args=(rank, self._world_size, rendezvous, outbox, enter, work, args),
                name=f"distlion worker {rank}",
                daemon=True,
            )
            self._processes.append(process)
            start_process(process)
            # Our copy must be closed, or the inbox would never come to its end.
            outbox.close()

    def listen(self, observe: Emit) -> Any:
        """Pass events on until all workers have ended well, or one has failed."""
        listening = True
        while listening:
            running = self._list_running()  # a worker that dies after this wakes the wait below
            if self._failures or self._silent_deaths():
                self._blame(observe)
            listening = self._receive(observe, running, timeout_s=None)
        assert self._result is not None  # rank 0 sends it before a good end
        return self._result.content

    def _list_running(self) -> list[int]:
        """Return the sentinels of workers not known to be dead; a death makes one ready."""
        return [process.sentinel for process in self._processes if process.exitcode is None]

    def _receive(self, observe: Emit, running: list[int], *, timeout_s: float | None) -> bool:
        """Wait for messages or deaths, and read one message of each worker that sent some.

        Returns:
            True if there was something to wait for: a running worker, or an inbox not at its end.
        """
        sources: list[Connection | int] = [*self._inboxes, *running]
        if not sources:
            return False
        ready = connection.wait(sources, timeout_s)
        for inbox in [inbox for inbox in self._inboxes if inbox in ready]:
            try:
                message = inbox.recv()
            except (EOFError, ConnectionResetError):
                del self._inboxes[inbox]
                continue
            match message:
                case _Event(content):
                    observe(content)
                case _Result():
                    self._result = message
                case Failure():
                    self._failures[self._inboxes[inbox]] = message
        return True

    def _silent_deaths(self) -> list[int]:
        """Return the ranks that died without a report: killed, or ended by ``os._exit``."""
        return [
            rank
            for rank, process in enumerate(self._processes)
            if process.exitcode not in (None, 0) and rank not in self._failures
        ]

    def _blame(self, observe: Emit) -> None:
        """Name the worker that failed first.

        Deaths without a report come first: the others' reports may only name a lost peer.
        """
        deadline_s = time.monotonic() + _BLAME_WINDOW_S
        waiting = True
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            waiting = self._receive(observe, self._list_running(), timeout_s=left_s)
        silent = self._silent_deaths()
        if silent:
            how = describe_exit(self._processes[silent[0]].exitcode)
            raise WorkerFailedError(f"worker {silent[0]} of {self._world_size} {how}")
        rank = min(self._failures, key=lambda rank: self._failures[rank].time_ns)
        self._failures[rank].raise_as(f"worker {rank} of {self._world_size}")

    def end(self) -> None:
        """End all workers that still run: by SIGTERM, and soon by SIGKILL."""
        end_processes(self._processes)
        for inbox in self._inboxes:
            inbox.close()


def _run_worker(
    rank: int,
    world_size: int,
    rendezvous: Path,
    outbox: Connection,
    enter: Enter | None,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Be one worker: join the group, work, and report the result or the failure."""
    become_child()
    if enter is not None:
        enter(rank)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def emit(content: Any) -> None:
        if rank == 0:
            outbox.send(_Event(content))

    try:
        dist.init_process_group(
            "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=world_size
        )
        result = work(emit, *args)
        dist.destroy_process_group()
    # The parent reports any exception; nothing is left to run here.
    except Exception as error:  # noqa: BLE001
        outbox.send(Failure.of(error))
        sys.exit(1)
    if rank == 0:
        outbox.send(_Result(result))

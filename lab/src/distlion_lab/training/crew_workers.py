"""Local workers of a crew: if one is killed, a newcomer takes its place."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch

from distlion.crew import Crew, start_store
from distlion_lab.errors import WorkerFailedError
from distlion_lab.tasks.base import Task
from distlion_lab.training.crew_loop import CrewLoop, Ending
from distlion_lab.training.loop import Progress
from distlion_lab.training.processes import (
    Failure,
    become_child,
    choose_context,
    describe_exit,
    end_processes,
    leaving_in_order,
    start_process,
)
from distlion_lab.training.record import Record
from distlion_lab.training.train_settings import TrainSettings

Load = Callable[[TrainSettings], Task]

REPLACED_AFTER_S = 3.0
"""Delay before a newcomer starts, so that users see the others go on without the lost worker."""
_HOST = "127.0.0.1"


@dataclass
class _Member:
    """A process, as its parent sees it.

    Attributes:
        is_gone: True once the parent has noted its end, which may come between any two checks.
    """

    process: BaseProcess
    inbox: Connection
    ending: Ending | None = None
    failure: Failure | None = None
    is_gone: bool = False


def train_crew(
    settings: TrainSettings,
    load: Load,
    observe: Callable[[Progress], None],
    *,
    preload: Sequence[str],
) -> Record:
    """Train with local workers that may be killed; a newcomer replaces each one.

    Args:
        settings: The run's settings; ``workers`` is the number of processes.
        load: Loads the task; importable by name.
        observe: Called with the first member's progress, and with notes on processes that end.
        preload: Modules to import once, before workers are forked.

    Returns:
        The record of the run, with the losses and the traffic of one member.

    Raises:
        WorkerFailedError: A worker raised an error, or all were killed.
    """
    with leaving_in_order():
        store = start_store(0, host=_HOST)
        company = _Company(settings, load, observe, port=store.port, preload=preload)
        try:
            return company.run()
        finally:
            company.end()


class _Company:
    """All processes of a run."""

    def __init__(
        self,
        settings: TrainSettings,
        load: Load,
        observe: Callable[[Progress], None],
        *,
        port: int,
        preload: Sequence[str],
    ) -> None:
        self._settings, self._load, self._port, self._observe = settings, load, port, observe
        self._secret = secrets.token_hex(16)
        self._context = choose_context([__name__, *preload])
        self._members: list[_Member] = []
        self._vacant_since_s: list[float] = []
        self._failures: list[Failure] = []
        self._last: Progress | None = None

    def run(self) -> Record:
        """Watch the processes until all that are left have finished the run."""
        for _ in range(self._settings.workers):
            self._start()
        while not self._have_all_ended():
            self._listen()
            self._replace()
        endings = [member.ending for member in self._members if member.ending is not None]
        if not endings:
            self._fail()
        digests = {ending.digest for ending in endings}
        sent = max(ending.record.sent_bytes_per_worker for ending in endings)
        # The member that was there longest knows most of the run.
        record = max(endings, key=lambda ending: ending.record.traffic["steps"]).record
        return replace(record, replicas_equal=len(digests) == 1, sent_bytes_per_worker=sent)

    def _start(self) -> None:
        inbox, outbox = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_be_member,
            args=(self._settings, self._load, self._port, self._secret, outbox),
            name=f"distlion member {len(self._members)}",
            daemon=True,
        )
        self._members.append(_Member(process, inbox))
        start_process(process)
        # Our copy must be closed, or the inbox would never come to its end.
        outbox.close()

    def _have_all_ended(self) -> bool:
        return all(member.is_gone for member in self._members) and (
            not self._vacant_since_s or self._is_over
        )

    @property
    def _is_over(self) -> bool:
        """True once a member has finished the run: nobody can join any more."""
        return any(member.ending is not None for member in self._members)

    def _listen(self) -> None:
        """Read one message of each process that sent some, and note the processes that died."""
        running = [member for member in self._members if not member.is_gone]
        sources: list[Any] = [member.inbox for member in running]
        sources += [member.process.sentinel for member in running]
        connection.wait(sources, timeout=0.2)
        for member in running:
            has_ended = member.process.exitcode is not None
            self._read(member)
            if has_ended:
                member.is_gone = True
                self._note_end(member)

    def _read(self, member: _Member) -> None:
        try:
            while member.inbox.poll():
                match member.inbox.recv():
                    case Progress() as progress:
                        self._last = progress
                        self._observe(progress)
                    case Ending() as ending:
                        member.ending = ending
                    case Failure() as failure:
                        member.failure = failure
                        self._failures.append(failure)
        except (EOFError, ConnectionResetError):
            pass

    def _note_end(self, member: _Member) -> None:
        """Report a process that ended before the run, and replace it if it was killed.

        Raises:
            WorkerFailedError: A worker raised an error that every other one would raise too, or
                too few workers are left and no newcomer is due.
        """
        if member.ending is not None or self._is_over:
            return
        if member.failure is None:
            self._vacant_since_s.append(time.monotonic())
            said = f"{describe_exit(member.process.exitcode)}; a newcomer takes its place"
        elif member.failure.is_of_crew and self._are_enough:
            said = f"has left: {member.failure.description}"
        else:
            self._fail()
        if self._last is not None:
            note = f"process {member.process.pid} {said}"
            self._observe(replace(self._last, note=note, validation_loss=None))

    @property
    def _are_enough(self) -> bool:
        """True if the remaining workers, with the newcomers that are due, can train."""
        left = sum(not member.is_gone for member in self._members)
        return left + len(self._vacant_since_s) >= _least(self._settings)

    def _replace(self) -> None:
        due = time.monotonic() - REPLACED_AFTER_S
        while self._vacant_since_s and self._vacant_since_s[0] < due and not self._is_over:
            self._vacant_since_s.pop(0)
            self._start()

    def _fail(self) -> NoReturn:
        if not self._failures:
            raise WorkerFailedError("all workers were killed")
        self._failures[0].raise_as("a worker")

    def end(self) -> None:
        """End all processes that still run."""
        end_processes([member.process for member in self._members])
        for member in self._members:
            member.inbox.close()


def _least(settings: TrainSettings) -> int:
    """Return the number of workers that the crew needs to train."""
    return max(2, settings.workers // 2 + 1)


def _be_member(
    settings: TrainSettings, load: Load, port: int, secret: str, outbox: Connection
) -> None:
    """Be one worker: join the crew, train, and report the end or the failure."""
    become_child()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(settings.threads)
    try:
        crew = Crew(f"{_HOST}:{port}", min_workers=_least(settings), secret=secret)
        with crew:
            ending = CrewLoop(settings, load(settings), crew, outbox.send).run()
        outbox.send(ending)
    # The parent reports any exception; nothing is left to run here.
    except Exception as error:  # noqa: BLE001
        outbox.send(Failure.of(error))
        sys.exit(1)

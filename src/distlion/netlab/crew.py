"""The workers of a sweep, as their parent sees them: one call goes to all, all answer."""

from __future__ import annotations

import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from distlion.errors import NetlabError, WorkerFailedError
from distlion.netlab.lab import Lab
from distlion.netlab.launch import MASTER_PORT, HostProcesses, place_ranks, show_line
from distlion.netlab.worker import Answer, Call

_POLL_S = 0.2


class Crew:
    """One worker on each host of a lab; leaving the ``with`` block ends them.

    Args:
        lab: Where they run.

    Raises:
        WorkerFailedError: One died.
    """

    def __init__(self, lab: Lab) -> None:
        self._processes = HostProcesses(show_line)
        self._connections: list[Connection] = []
        try:
            for placement in place_ranks(lab.n_hosts, 1):
                ours, theirs = Pipe()
                command = [sys.executable, "-m", "distlion.netlab.worker", str(theirs.fileno())]
                self._connections.append(ours)
                self._processes.start(
                    lab,
                    placement,
                    command,
                    placement.environment(lab.plan.address(0), MASTER_PORT),
                    pass_fds=[theirs.fileno()],
                )
                # Ours must be closed, or a worker's death would not end the pipe.
                theirs.close()
            self._collect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Let all workers do something, and return what each found, in rank order.

        Raises:
            NetlabError: One could not do it; the message is what the first of them said.
            WorkerFailedError: One died.
        """
        for connection in self._connections:
            connection.send(Call(verb, arguments))
        answers = self._collect()
        for answer in answers:
            if answer.refusal:
                raise NetlabError(answer.refusal)
        return [answer.value for answer in answers]

    def _collect(self) -> list[Answer]:
        answers: dict[Connection, Answer] = {}
        while len(answers) < len(self._connections):
            waiting = [each for each in self._connections if each not in answers]
            for connection in wait(waiting, _POLL_S):
                assert isinstance(connection, Connection)
                try:
                    answers[connection] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._blame()
            self._processes.serve(timeout_s=0)
        return [answers[connection] for connection in self._connections]

    def _blame(self) -> None:
        status = self._processes.wait()
        raise WorkerFailedError(f"a worker of the sweep ended with status {status}; see above")

    def close(self) -> None:
        """End all workers."""
        for connection in self._connections:
            connection.close()
        self._processes.end()

"""The workers of a sweep, as their parent sees them: each call goes to all, and all answer."""

from __future__ import annotations

import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

from distlion_lab.errors import NetlabError, WorkerFailedError
from distlion_netlab.calls import Answer, Call
from distlion_netlab.lab import Lab
from distlion_netlab.launch import MASTER_PORT, HostProcesses, place_ranks, show_line

_POLL_S = 0.2
# The worker's module imports transformers, which the parent does not need.
_COMMAND = "from distlion_netlab.sweep_worker import main; main()"
# c10d warns that hosts have no names.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class Fleet:
    """One worker on each host of a lab; leaving the ``with`` block ends them.

    Args:
        lab: Lab for the workers.

    Raises:
        WorkerFailedError: A worker died.
    """

    def __init__(self, lab: Lab) -> None:
        self._processes = HostProcesses(show_line)
        self._connections: list[Connection] = []
        try:
            for placement in place_ranks(lab.n_hosts, 1):
                ours, theirs = Pipe()
                command = [sys.executable, "-c", _COMMAND, str(theirs.fileno())]
                self._connections.append(ours)
                self._processes.start(
                    lab,
                    placement,
                    command,
                    placement.environment(lab.plan.address(0), MASTER_PORT) | _QUIET,
                    pass_fds=[theirs.fileno()],
                )
                # Our copy must be closed, or a worker's death would not end the pipe.
                theirs.close()
            self._collect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers, and return their answers in rank order.

        Raises:
            NetlabError: A worker could not do it; the message is the first one's refusal.
            WorkerFailedError: One died.
        """
        for connection in self._connections:
            try:
                connection.send(Call(verb, arguments))
            except (BrokenPipeError, ConnectionResetError):
                self._blame()
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

    def _blame(self) -> NoReturn:
        status = self._processes.wait()
        raise WorkerFailedError(f"a worker of the sweep ended with status {status}; see above")

    def close(self) -> None:
        """End all workers."""
        for connection in self._connections:
            connection.close()
        self._processes.end()

"""Run programs as ``python -c`` would, in forks of an interpreter that has imported torch.

    with Programs() as programs:
        ended = programs.run("import torch; print(1)", tmp_path, RANK="0")
        program = programs.start("import sys; print(sys.argv[1])", tmp_path, "an argument")
        ended = program.end()

To start an interpreter, import torch and make a first optimizer takes 3 seconds; a fork of one that
has imported all of it takes milliseconds. A program runs as ``__main__`` up to the end of its
interpreter.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


@dataclass(frozen=True)
class Ended:
    """How a program came to its end.

    Attributes:
        status: Its exit status, or the negative number of a signal.
        text: What it wrote; without what it wrote to stderr where that is kept apart.
        errors: What it wrote to stderr, kept apart.
    """

    status: int
    text: str
    errors: str = ""


@dataclass(frozen=True)
class Program:
    """A program that has been started; its parent is the process that forks."""

    programs: Programs
    pid: int
    logs: tuple[str, str]

    def end(self) -> Ended:
        """Wait for the end of the program, and return how it ended."""
        status = self.programs.ask({"pid": self.pid})
        texts = []
        for log in self.logs:
            texts.append(Path(log).read_text())
            os.unlink(log)
        return Ended(status, *texts)


class Programs:
    """The process that forks, as its parent sees it."""

    def __enter__(self) -> Programs:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def run(self, code: str, folder: Path, **environment: str) -> Ended:
        """Run a program in a folder, with variables beside the ones of this process."""
        return self.start(code, folder, merges=True, **environment).end()

    def start(
        self, code: str, folder: Path, *arguments: str, merges: bool = False, **environment: str
    ) -> Program:
        """Start a program as ``run`` does, with arguments, and stderr apart unless it merges."""
        logs = []
        for _ in range(2):
            descriptor, log = tempfile.mkstemp(prefix="distlion-program-")
            os.close(descriptor)
            logs.append(log)
        request = {
            "code": code,
            "folder": str(folder),
            "arguments": arguments,
            "environment": {**os.environ, **environment},
            "logs": [logs[0], logs[0 if merges else 1]],
        }
        return Program(self, self.ask(request), (logs[0], logs[1]))

    def ask(self, request: dict[str, Any]) -> int:
        """Send a request to the process that forks; return the number that it answers."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def enter(request: dict[str, Any]) -> None:
    """Become a program: its folder, its environment, its output into a file."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    logs = [os.open(log, os.O_WRONLY | os.O_APPEND) for log in request["logs"]]
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *logs)):
        os.dup2(descriptor, number)
    # As ``python -c`` has them: not the folder and the name of this file.
    sys.path[0], sys.argv = "", ["-c", *request["arguments"]]
    # It ends a program that does not end by itself.
    signal.alarm(TIMEOUT_S)


def serve() -> str | None:
    """Start each program in a fork, and answer its process; there, return the program.

    A request with a process is to wait for its end, and to answer its status.
    """
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "pid" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            enter(request)
            return str(request["code"])
        print(pid, flush=True)
    return None


if __name__ == "__main__":
    import torch
    import torch._dynamo
    import torch.distributed

    import distlion

    torch.set_num_threads(1)
    assert distlion.__version__
    # Else every interpreter that ends would copy the pages of all that was imported.
    gc.freeze()
    found = serve()
    if found is not None:
        exec(compile(found, "<string>", "exec"), {"__name__": "__main__"})

"""Run programs as ``python -c`` would, in forks of an interpreter that has imported torch.

    with Programs() as programs:
        ended = programs.run("import torch; print(1)", tmp_path, RANK="0")

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
        text: All that it wrote.
    """

    status: int
    text: str


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
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as log:
            request = {
                "code": code,
                "folder": str(folder),
                "environment": {**os.environ, **environment},
                "log": log.name,
            }
            print(json.dumps(request), file=self._server.stdin, flush=True)
            return Ended(int(self._server.stdout.readline()), log.read())


def enter(request: dict[str, Any]) -> None:
    """Become a program: its folder, its environment, its output into a file."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY)
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(descriptor, number)
    # As ``python -c`` has them: not the folder and the name of this file.
    sys.path[0], sys.argv = "", ["-c"]
    # It ends a program that does not end by itself.
    signal.alarm(TIMEOUT_S)


def serve() -> str | None:
    """Fork for every request, and answer when the fork has ended; in a fork, return its code."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            enter(request)
            return str(request["code"])
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
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

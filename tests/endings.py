"""Run training scripts on three ranks each, and tell how every process came to its end.

    python endings.py FOLDER < scenes.json > endings.json

A scene is {"script": text, "victim": rank or null}. A rank is a fork of this process, which has
imported torch already, and runs the script as ``__main__`` up to the end of its interpreter. A
victim that was stopped goes on when the others have ended. The script finds the rendezvous in its
environment, and creates the file named by the variable FAILED when it fails.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed

import distlion

RANKS = 3
AT_ONCE = 3


def enter(folder: Path, rank: int, port: int) -> None:
    """Become a rank: its environment, and its output into a file."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "FAILED": str(folder / "failed"),
    }
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launch:
    """The scenes that run at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, tuple[int, int]] = {}
        self._victims: dict[int, tuple[int, int]] = {}
        self._left: dict[int, int] = {}
        self.endings: dict[tuple[int, int], dict[str, Any]] = {}

    def start(self, number: int, scene: dict[str, Any]) -> str | None:
        """Fork the ranks; in a rank, return its script."""
        folder = self._folder / str(number)
        folder.mkdir()
        port = free_port()
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                enter(folder, rank, port)
                return str(scene["script"])
            self._running[pid] = (number, rank)
            if rank == scene["victim"]:
                self._victims[number] = (pid, rank)
        self._left[number] = RANKS
        return None

    def wait(self) -> None:
        """Wait for all."""
        while self._running:
            pid, status = os.waitpid(-1, 0)
            number, rank = self._running.pop(pid)
            self.endings[number, rank] = {"status": os.waitstatus_to_exitcode(status)}
            self._left[number] -= 1
            victim, victim_rank = self._victims.get(number, (0, 0))
            if self._left[number] == 1 and (number, victim_rank) not in self.endings and victim:
                os.kill(victim, signal.SIGCONT)

    def kill(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)


def run_all(folder: Path, scenes: list[dict[str, Any]]) -> str | None:
    """Run the scenes, a few at once; in a rank, return its script."""
    launch = Launch(folder)
    signal.signal(signal.SIGTERM, lambda *_: launch.kill())
    for first in range(0, len(scenes), AT_ONCE):
        for number in range(first, min(first + AT_ONCE, len(scenes))):
            script = launch.start(number, scenes[number])
            if script is not None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                return script
        launch.wait()
    rows = []
    for number in range(len(scenes)):
        own = folder / str(number)
        has_failed = (own / "failed").exists()
        rows.append(
            [
                launch.endings[number, rank]
                | {"text": (own / f"log{rank}").read_text(), "has_failed": has_failed}
                for rank in range(RANKS)
            ]
        )
    print(json.dumps(rows))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert distlion.__version__
    # Else every interpreter that ends would copy the pages of all that was imported.
    gc.freeze()
    found = run_all(Path(sys.argv[1]), json.load(sys.stdin))
    if found is not None:
        # The interpreter ends as if it had been started with this script.
        exec(compile(found, "script", "exec"), {"__name__": "__main__"})

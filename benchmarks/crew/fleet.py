"""The workers of one system: started, killed, stopped and woken, as whole process trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from systems import COORDINATOR, System

POLL_S = 0.05
COORDINATOR_S = 60.0
MOST_ACCIDENTS = 40
LISTENS = "0A"
"""The state of a socket in Linux' tables."""


class SoakError(Exception):
    """A system does not run at all."""


@dataclass
class Life:
    """One process of a worker, from its start to its end.

    Attributes:
        worker: Number of the worker.
        log: Where it writes its steps.
        popen: The process, or the agent that has it.
        is_stopped: Whether SIGSTOP holds it.
        last_time_s, last_epoch, last_step: Of its last committed step.
        peak_kib: The most memory that it held, once it was killed.
    """

    worker: int
    log: Path
    popen: subprocess.Popen[bytes]
    is_stopped: bool = False
    last_time_s: float = 0.0
    last_epoch: int = -1
    last_step: int = -1
    peak_kib: int = 0
    _offset: int = field(default=0, repr=False)

    def look(self) -> None:
        """Read what it has written since the last look."""
        if not self.log.exists():
            return
        with self.log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line["kind"] == "step":
                self.last_time_s, self.last_epoch = line["time_s"], line["epoch"]
                self.last_step = line["step"]

    def read_peak(self) -> None:
        """Note the most memory that one of its processes has held so far."""
        self.peak_kib = max(map(read_peak, list_tree(self.popen.pid)))

    def signal_tree(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        for pid in list_tree(self.popen.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def list_tree(pid: int) -> list[int]:
    """Return a process and its descendants, the eldest first."""
    found = [pid]
    for parent in found:
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        found += map(int, text.split())
    return found


def read_peak(pid: int) -> int:
    """Return the most memory that a process has held, in KiB; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.partition("VmHWM:")[2].split(maxsplit=1)[0]) if "VmHWM:" in text else 0


def list_listening(pid: int) -> set[int]:
    """Return the ports at which somebody listens on the host of a process."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
        except OSError:
            continue
        rows = [line.split() for line in lines[1:]]
        found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS}
    return found


class Fleet:
    """All workers of a run of one system; leaving the ``with`` block kills them.

    Args:
        system: What they run.
        folder: Of their logs and of what they print.

    Attributes:
        lives: Of all processes, those that are over too.
        accidents: Workers that ended though nobody had killed them, with time and status.
    """

    def __init__(self, system: System, folder: Path) -> None:
        self._system, self._folder = system, folder
        self.lives: list[Life] = []
        self.accidents: list[dict[str, Any]] = []
        self._running: dict[int, Life] = {}

    def __enter__(self) -> Fleet:
        command = self._system.command_coordinator()
        output = self._folder / "coordinator.txt"
        self._coordinator = self._start(COORDINATOR, command, output)
        self._await_coordinator()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in list(self._running):
            self.kill(worker)
        self._coordinator.kill()
        self._coordinator.wait()

    def _await_coordinator(self) -> None:
        limit_s = time.monotonic() + COORDINATOR_S
        while self._coordinator.poll() is None and time.monotonic() < limit_s:
            if self._system.port in list_listening(self._coordinator.pid):
                return
            time.sleep(POLL_S)
        self._coordinator.kill()
        raise SoakError(f"no coordinator listens, see {self._folder}")

    def _start(self, number: int, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                [*self._system.list_entrance(number), *command],
                env=os.environ | self._system.list_environment(number),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def n_awake(self) -> int:
        """Number of workers that run and are not stopped."""
        return sum(not life.is_stopped for life in self._running.values())

    def start(self, worker: int) -> None:
        """Start a worker, for the first time or again."""
        number = sum(life.worker == worker for life in self.lives)
        log = self._folder / f"worker-{worker}.{number}.jsonl"
        command = self._system.command_worker(worker, log)
        popen = self._start(worker, command, log.with_suffix(".txt"))
        self._running[worker] = life = Life(worker, log, popen)
        self.lives.append(life)

    def kill(self, worker: int) -> None:
        """End a worker by SIGKILL, as when its host is lost."""
        life = self._running.pop(worker)
        life.read_peak()
        life.signal_tree(signal.SIGKILL)
        life.popen.wait()

    def restart(self) -> None:
        """End all workers by SIGKILL, and start them again."""
        lives = dict(self._running)
        for life in lives.values():
            life.read_peak()
        for life in lives.values():
            life.signal_tree(signal.SIGKILL)
        for worker, life in lives.items():
            life.popen.wait()
            self.start(worker)

    def stop(self, worker: int) -> None:
        """Hold a worker by SIGSTOP."""
        self._running[worker].is_stopped = True
        self._running[worker].signal_tree(signal.SIGSTOP)

    def wake(self, worker: int) -> None:
        """Let a worker that was stopped go on."""
        self._running[worker].is_stopped = False
        self._running[worker].signal_tree(signal.SIGCONT)

    def replace_the_dead(self) -> None:
        """Start workers again that have ended by themselves."""
        for worker, life in list(self._running.items()):
            status = life.popen.poll()
            if status is not None:
                accident = {"time_s": time.monotonic(), "worker": worker, "status": status}
                self.accidents.append({**accident, "log": life.log.name})
                if len(self.accidents) > MOST_ACCIDENTS:
                    raise SoakError(f"workers end again and again, see {self._folder}")
                self.start(worker)

    def find_last_step(self) -> int:
        """Return the last step that a running worker has committed; -1 for none."""
        for life in self._running.values():
            life.look()
        return max((life.last_step for life in self._running.values()), default=-1)

    def has_settled(self, since_s: float) -> bool:
        """Return whether all workers that are awake train together, since a moment."""
        awake = [life for life in self._running.values() if not life.is_stopped]
        for life in awake:
            life.look()
        together = len({life.last_epoch for life in awake}) == 1
        return together and all(life.last_time_s > since_s for life in awake)

"""Run processes on the hosts of a lab with torchrun's environment variables, and end them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from distlion.errors import InvalidArgumentError
from distlion.signals import deferred_signals
from distlion_lab.training.processes import describe_exit
from distlion_netlab.lab import Lab
from distlion_netlab.lab_plan import INTERFACE, NAMESPACE_FOLDER

MASTER_PORT = 29500
# Time for the others to go on after a rank has failed, and again to end.
GRACE_S = 2.0
TERMINATE_S = 2.0

# Hosts of a lab have no names, and torch would warn of it on every rank. The user's level wins.
_QUIET = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}

_ENTER = Path(__file__).with_name("enter.py")
_CHUNK_BYTES = 1 << 16

Show = Callable[[int, bool, bytes], None]
Blame = Callable[[int, str], None]
"""Called with a rank, True for its standard error, and one line without its end."""


@dataclass(frozen=True)
class Placement:
    """The place of a process.

    Attributes:
        rank, world_size: Place in the whole lab; the ranks of a host are neighbors.
        host, n_hosts: Place of the host: torchrun's group rank and number of groups.
        local_rank, per_host: Place on the host.
    """

    rank: int
    world_size: int
    host: int
    n_hosts: int
    local_rank: int
    per_host: int

    def environment(self, master_address: str, master_port: int) -> dict[str, str]:
        """Return the variables that torchrun would set, and Gloo's interface."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.per_host),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(self.n_hosts),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }


def place_ranks(n_hosts: int, per_host: int) -> list[Placement]:
    """Give each host ``per_host`` neighboring ranks.

    Raises:
        InvalidArgumentError: ``per_host`` is below 1.
    """
    if per_host < 1:
        raise InvalidArgumentError(f"per_host is {per_host}; expected 1 or more")
    world_size = n_hosts * per_host
    return [
        Placement(rank, world_size, rank // per_host, n_hosts, rank % per_host, per_host)
        for rank in range(world_size)
    ]


def run_command(
    lab: Lab,
    command: Sequence[str],
    *,
    per_host: int = 1,
    master_port: int = MASTER_PORT,
    environment: Mapping[str, str] | None = None,
    show: Show | None = None,
    blame: Blame | None = None,
) -> int:
    """Run a command on every host, and wait for all of its processes.

    If one ends with a status other than 0, the others get 2 s, then SIGTERM, and 2 s later SIGKILL.
    No process outlives this function. Each has a process group of its own, which is killed as a
    whole, and each dies with the thread that called this.

    Args:
        lab: Where to run it.
        command: Program and arguments, the same for all ranks.
        per_host: Processes on each host.
        master_port: ``MASTER_PORT`` of the environment, on host 0.
        environment: Further variables; they override torchrun's.
        show: Called with each line of output; None writes it to standard output and error with
            the rank in front.
        blame: Called with the rank that failed first, and a description of the failure.

    Returns:
        0, or the status of the rank that failed first; 128 + n if signal n killed it.

    Raises:
        InvalidArgumentError: There is no command, or ``per_host`` is below 1.
    """
    with HostProcesses(show or show_line) as processes:
        for placement in place_ranks(lab.n_hosts, per_host):
            variables = _QUIET | placement.environment(lab.plan.address(0), master_port)
            processes.start(lab, placement, command, variables | dict(environment or {}))
        status = processes.wait()
        if processes.culprit is not None and blame is not None:
            blame(*processes.culprit)
        return status


def show_line(rank: int, is_error: bool, line: bytes) -> None:
    """Write a line with the rank in front."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(f"[{rank}] {line.decode(errors='replace')}\n")
    stream.flush()


def _discard(rank: int, is_error: bool, line: bytes) -> None:
    """Show nothing."""


@dataclass
class _HostProcess:
    """One process, its pidfd, and the unfinished lines of its two streams."""

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    status: int | None = None
    tails: dict[bool, bytes] = field(default_factory=lambda: {False: b"", True: b""})

    def kill_group(self, number: int) -> None:
        # The process is collected only after this, so the group's number is still its own.
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)

    def collect(self) -> int:
        """Note the status of an ended process, and kill the rest of its group."""
        self.kill_group(signal.SIGKILL)
        status = self.popen.wait()
        self.status = status if status >= 0 else 128 - status
        os.close(self.pidfd)
        return self.status


class HostProcesses:
    """The processes of one launch; leaving the ``with`` block ends them.

    Args:
        show: Called with each line of their output.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._processes: list[_HostProcess] = []
        self._events = selectors.DefaultSelector()
        self._first_failure: int | None = None
        self._culprit: tuple[int, str] | None = None

    def __enter__(self) -> HostProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(
        self,
        lab: Lab,
        placement: Placement,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start one process on its host.

        Raises:
            InvalidArgumentError: There is no command.
        """
        if not command:
            raise InvalidArgumentError("there is no command to run")
        # An interrupted start would leave a process that nobody ends.
        with deferred_signals("the start of a process", gives_way=False):
            self._start(lab, placement, command, environment, pass_fds)

    def _start(
        self,
        lab: Lab,
        placement: Placement,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> None:
        namespace = NAMESPACE_FOLDER / lab.plan.host_namespaces[placement.host]
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_ENTER), str(namespace), str(os.getpid()), *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            # Ctrl-C then reaches only us, and a signal to the group reaches grandchildren.
            start_new_session=True,
        )
        process = _HostProcess(placement.rank, popen, os.pidfd_open(popen.pid))
        self._processes.append(process)
        self._events.register(process.pidfd, selectors.EVENT_READ, (process, None))
        for is_error, stream in ((False, popen.stdout), (True, popen.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._events.register(stream, selectors.EVENT_READ, (process, is_error))

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [process.rank for process in self._running()]

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank and all processes it has started; nothing if it has ended."""
        for process in self._running():
            if process.rank == rank:
                process.kill_group(number)

    @property
    def culprit(self) -> tuple[int, str] | None:
        """The rank that failed first, with a description of the failure; None if none has."""
        return self._culprit

    def wait(self) -> int:
        """Wait for all; if one fails, end the others.

        Returns:
            0, or the status of the rank that failed first.
        """
        while self._running():
            self.serve(timeout_s=None)
            if self._first_failure is not None:
                self._wind_down()
        return self._first_failure or 0

    def serve(self, *, timeout_s: float | None) -> None:
        """Wait for output or the end of a process, and handle it."""
        for key, _ in self._events.select(timeout_s):
            process, is_error = key.data
            if is_error is None:
                self._note_end(process)
            else:
                self._pass_on(process, is_error)

    @deferred_signals("the end of processes", gives_way=False)
    def end(self) -> None:
        """End all running processes, by SIGTERM and soon by SIGKILL; their last output is lost.

        No signal interrupts this.
        """
        # An error in ``show`` may be the reason for this call.
        self._show = _discard
        self._signal_and_wait(signal.SIGTERM, TERMINATE_S)
        self._signal_and_wait(signal.SIGKILL, None)
        self._events.close()
        for process in self._processes:
            for stream in (process.popen.stdout, process.popen.stderr):
                assert stream is not None
                stream.close()
        self._processes.clear()

    def _wind_down(self) -> None:
        self._serve_until(time.monotonic() + GRACE_S)
        self._signal_and_wait(signal.SIGTERM, TERMINATE_S)
        self._signal_and_wait(signal.SIGKILL, None)

    def _signal_and_wait(self, number: int, timeout_s: float | None) -> None:
        for process in self._running():
            process.kill_group(number)
        self._serve_until(None if timeout_s is None else time.monotonic() + timeout_s)

    def _serve_until(self, deadline_s: float | None) -> None:
        while self._running():
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self.serve(timeout_s=left_s)

    def _running(self) -> list[_HostProcess]:
        return [process for process in self._processes if process.status is None]

    def _note_end(self, process: _HostProcess) -> None:
        self._events.unregister(process.pidfd)
        status = process.collect()
        if status and self._first_failure is None:
            self._first_failure = status
            self._culprit = process.rank, describe_exit(process.popen.returncode)
        for is_error in (False, True):
            self._pass_on(process, is_error)
            if process.tails[is_error]:
                self._show(process.rank, is_error, process.tails[is_error])
                process.tails[is_error] = b""

    def _pass_on(self, process: _HostProcess, is_error: bool) -> None:
        """Read the available output of a stream, and show its complete lines."""
        stream = process.popen.stderr if is_error else process.popen.stdout
        assert stream is not None
        while (chunk := _read(stream.fileno())) is not None:
            if not chunk:
                with contextlib.suppress(KeyError):
                    self._events.unregister(stream)
                return
            *lines, process.tails[is_error] = (process.tails[is_error] + chunk).split(b"\n")
            for line in lines:
                self._show(process.rank, is_error, line)


def _read(descriptor: int) -> bytes | None:
    """Read once; return b"" at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None

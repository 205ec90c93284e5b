"""A process that forwards a lab's frames in place of its bridge, each one after the latency."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import NetlabError
from distlion_netlab.lab_plan import NAMESPACE_FOLDER, LabPlan
from distlion_netlab.wires import list_processes

_ENTER = Path(__file__).with_name("enter.py")
_FORWARD = Path(__file__).with_name("forward.py")
_NOBODY = 0
_PATIENCE_S = 10
LEAST_LATENCY_S, MOST_LATENCY_S = 1e-3, 10.0


def check_latency(latency_s: float) -> None:
    """Check a latency between hosts; 0 is for none.

    Raises:
        InvalidArgumentError: It is out of range.
    """
    if latency_s and not LEAST_LATENCY_S <= latency_s <= MOST_LATENCY_S:
        raise InvalidArgumentError(
            f"latency of {latency_s:g} s: expected 0 for none, or {LEAST_LATENCY_S:g} to "
            f"{MOST_LATENCY_S:g} s from one host to another"
        )


def start_switch(plan: LabPlan, latency_s: float, *, stays: bool) -> None:
    """Start the process in the bridge's namespace, and wait until it forwards.

    Args:
        plan: The lab, whose ports are up and belong to no bridge.
        latency_s: Seconds that a frame takes from one host to another.
        stays: Whether it outlives this process.

    Raises:
        NetlabError: It cannot forward.
    """
    namespace = NAMESPACE_FOLDER / plan.bridge_namespace
    owner = _NOBODY if stays else os.getpid()
    ports = [plan.port(host) for host in range(plan.n_hosts)]
    python = [sys.executable, "-I", "-S"]
    finished = subprocess.run(
        [
            *(*python, str(_ENTER), str(namespace), str(os.getpid())),
            *(*python, str(_FORWARD), str(owner), repr(latency_s), *ports),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,  # Ctrl-C is for the lab's owner
        check=False,
    )
    if not finished.stdout:
        reason = [finished.returncode, *finished.stderr.splitlines()][-1]
        raise NetlabError(f"frames cannot be delayed: {reason}")


def find_switch(plan: LabPlan) -> list[int]:
    """Find the process that forwards a lab's frames; empty where there is none."""
    return [pid for pid in list_processes(plan) if _forwards(pid)]


def stop_switch(plan: LabPlan) -> None:
    """End the process that forwards a lab's frames, and wait until it has ended."""
    for pid in find_switch(plan):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], _PATIENCE_S)
            finally:
                os.close(descriptor)


def _forwards(pid: int) -> bool:
    try:
        return str(_FORWARD) in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False

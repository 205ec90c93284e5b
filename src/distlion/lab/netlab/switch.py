"""A process that forwards a lab's frames in place of its bridge, so that they take a while."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distlion.errors import InvalidArgumentError, NetlabError
from distlion.lab.netlab.lab_plan import LabPlan
from distlion.lab.netlab.wires import list_processes

_ENTER = Path(__file__).with_name("enter.py")
_FORWARD = Path(__file__).with_name("forward.py")
_NAMESPACE_FOLDER = Path("/run/netns")
_NOBODY = 0
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


def start_switch(plan: LabPlan, latency_s: float, *, stays: bool) -> list[subprocess.Popen[str]]:
    """Start the process in the bridge's namespace, and wait until it forwards.

    Args:
        plan: The lab, whose ports are up and belong to no bridge.
        latency_s: Seconds that a frame takes from one host to another.
        stays: Whether it outlives this process.

    Returns:
        The child to wait for once it was ended; none if it stays.

    Raises:
        NetlabError: It cannot forward.
    """
    ports = [plan.port(host) for host in range(plan.n_hosts)]
    python = [sys.executable, "-I", "-S"]
    popen = subprocess.Popen(
        [
            *(*python, str(_ENTER), str(_NAMESPACE_FOLDER / plan.bridge_namespace)),
            str(_NOBODY if stays else os.getpid()),
            *(*python, str(_FORWARD), repr(latency_s), *ports),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the lab's owner
    )
    assert popen.stdout is not None
    assert popen.stderr is not None
    with popen.stdout, popen.stderr:
        forwards = popen.stdout.readline()
        said = "" if forwards else popen.stderr.read()
    if stays or not forwards:
        popen.wait()
    if not forwards:
        reason = [popen.returncode, *said.splitlines()][-1]
        raise NetlabError(f"frames cannot be delayed: {reason}")
    return [] if stays else [popen]


def stop_switch(plan: LabPlan, children: Sequence[subprocess.Popen[str]]) -> None:
    """End the process of a lab; nothing else runs beside the bridge.

    Args:
        plan: The lab.
        children: The result of ``start_switch``; none in another process.
    """
    for pid in list_processes(plan, of_bridge=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        child.wait()

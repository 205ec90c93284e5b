"""Conditions of a benchmark: its commit and its machine, for the record."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from distlion_netlab.sweep import read_conditions as read_machine

_TCP = ("tcp_congestion_control", "tcp_slow_start_after_idle")


def read_tcp() -> dict[str, str]:
    """Read how TCP behaves in this process's network namespace, on Linux."""
    folder = Path("/proc/sys/net/ipv4")
    files = {name: folder / name for name in _TCP}
    return {name: file.read_text().strip() for name, file in files.items() if file.exists()}


def read_conditions(**of_run: Any) -> dict[str, Any]:
    """Return the commit, the machine and how the benchmark was called; called before it begins."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {"commit": answer.stdout.strip() or "unknown", **read_machine(), **of_run}

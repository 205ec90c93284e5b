"""Conditions of a benchmark: its commit and its machine, for the record."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from distlion_netlab.sweep import read_conditions as read_machine


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

"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def read_conditions(*, rehearses: bool) -> dict[str, Any]:
    has_device = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_device else None
    return {
        "date": dt.date.today().isoformat(),
        "command": " ".join(["python benchmarks/gpu", *sys.argv[1:]]),
        "rehearsal": rehearses,
        "commit": ask("git", "rev-parse", "HEAD"),
        "dirty": bool(ask("git", "status", "--porcelain")),
        "device": properties.name if properties else None,
        "memory_gib": round(properties.total_memory / 2**30) if properties else None,
        "capability": list(torch.cuda.get_device_capability(0)) if has_device else None,
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": getattr(torch.version, "cuda", None),
        "torch": torch.__version__,
        "triton": find_version("triton"),
        "lion_pytorch": find_version("lion-pytorch"),
        "bitsandbytes": find_version("bitsandbytes"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ask(*command: str) -> str | None:
    """Return the first line of what a command says; None where it is not there or fails."""
    try:
        said = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (said.stdout.splitlines() or [""])[0]

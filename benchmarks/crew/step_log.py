"""Write down what a worker of any system does: a line of JSON for each step, with digests."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

RESOURCES_EVERY = 20
"""Steps between two readings of memory, file descriptors and threads."""
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class StepLog:
    """The log of one process.

    Args:
        file: Where lines are appended, each with one write.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._n_lines = 0

    def write_ready(self) -> None:
        """Note that everything is imported and built: from here on the system counts."""
        self._write({"kind": "ready", **read_resources()})

    def write_failure(self, step: int) -> None:
        """Note a step that was not committed."""
        self._write({"kind": "failed", "step": step})

    def write_commit(self, *, step: int, epoch: int, params: Iterable[torch.Tensor]) -> None:
        """Note a committed step.

        Args:
            step: Its number.
            epoch: Number of the membership in which it was committed.
            params: What is digested.
        """
        line: dict[str, object] = {"kind": "step", "step": step, "epoch": epoch}
        line["digest"] = digest(params)
        if self._n_lines % RESOURCES_EVERY == 0:
            line |= read_resources()
        self._n_lines += 1
        self._write(line)

    def _write(self, line: dict[str, object]) -> None:
        line = {"time_s": round(time.monotonic(), 4), **line}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def digest(params: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the bits of tensors."""
    found = 0
    for param in params:
        found = zlib.crc32(param.detach().numpy().data, found)
    return found


def read_resources() -> dict[str, int]:
    """Return what this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_kib": pages * _PAGE_KIB,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }

"""Read damaged files of a format, and count what comes of it; in a process of its own."""

from __future__ import annotations

import faulthandler
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Protocol

from distlion.errors import DistlionError
from formats.checkpoints import Checkpoints, TensorFiles
from formats.data_sets import CifarBatches, ModelConfigs
from formats.records import Comparisons, SavedRuns

FORMATS: dict[str, Any] = {
    "cifar": CifarBatches,
    "config": ModelConfigs,
    "checkpoint": Checkpoints,
    "safetensors": TensorFiles,
    "comparison": Comparisons,
    "run": SavedRuns,
}
# Of addresses, beyond those that torch has mapped: a file that asks for more is a bomb.
MEMORY_BYTES = 1 << 30
# No file here is larger than some kilobytes.
MOST_S = 20
_SHOWN = 5
_MEMORY = Path("/dev/shm")


class Format(Protocol):
    """Files of one format, each valid until it is damaged."""

    def attempt(self, chance: random.Random) -> None:
        """Damage a file, and read it."""


def prepare_process() -> None:
    """Let no file take more than ``MEMORY_BYTES`` or ``MOST_S``, and a crash show where."""
    faulthandler.enable()
    # The signal ends the process then.
    faulthandler.register(signal.SIGALRM, chain=True)
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def try_one(subject: Format, chance: random.Random) -> str:
    """Damage a file and read it; return what came of it."""
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        subject.attempt(chance)
    except DistlionError:
        return "refused"
    except Exception:
        return traceback.format_exc()
    return "read"


def run(name: str, first: int, count: int) -> dict[str, Any]:
    """Try some damaged files of a format."""
    begun_s = time.monotonic()
    found: dict[str, Any] = {"format": name, "read": 0, "refused": 0, "untyped": 0}
    # Each attempt writes files, which costs milliseconds on a disk.
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        subject = FORMATS[name](Path(folder))
        for number in range(first, first + count):
            outcome = try_one(subject, random.Random(f"{name} {number}"))
            if outcome in found:
                found[outcome] += 1
            else:
                found["untyped"] += 1
                if found["untyped"] <= _SHOWN:
                    print(f"{name} {number}: {outcome}", file=sys.stderr, flush=True)
                subject = FORMATS[name](Path(tempfile.mkdtemp(dir=folder)))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {**found, "seconds": round(time.monotonic() - begun_s, 1)}

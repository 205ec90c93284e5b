"""Read damaged files of some formats, and count what comes of it: what a child process does.

PYTHONPATH=tests python -m formats --count 1000 cifar checkpoint
PYTHONPATH=tests python -m formats --first 17 --count 1 cifar

Ends with 0 where each file was read, or refused with an error of distlion.errors.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch

from distlion.errors import DistlionError
from formats.checkpoints import Checkpoints, TensorFiles
from formats.data_sets import CifarBatches, ModelConfigs
from formats.records import Comparisons, Records, SavedRuns

FORMATS: dict[str, Any] = {
    "cifar": CifarBatches,
    "config": ModelConfigs,
    "checkpoint": Checkpoints,
    "safetensors": TensorFiles,
    "record": Records,
    "comparison": Comparisons,
    "run": SavedRuns,
}
# Of addresses, beyond those that torch has mapped: a file that asks for more is a bomb.
MEMORY_BYTES = 1 << 30
# No file here is larger than some kilobytes.
MOST_S = 20
_SHOWN = 5


class Format(Protocol):
    """Files of one format, each valid until it is damaged."""

    def attempt(self, chance: random.Random) -> None:
        """Damage a file, and read it."""


def limit_memory() -> None:
    """Let no file take more than ``MEMORY_BYTES``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def try_one(subject: Format, chance: random.Random) -> str:
    """Damage a file and read it; return what came of it."""
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    try:
        subject.attempt(chance)
    except DistlionError:
        return "refused"
    except Exception:
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "read"


def run(name: str, first: int, count: int) -> dict[str, Any]:
    """Try some damaged files of a format."""
    begun_s = time.monotonic()
    found: dict[str, Any] = {"format": name, "read": 0, "refused": 0, "untyped": 0}
    with tempfile.TemporaryDirectory() as folder:
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
    return {**found, "seconds": round(time.monotonic() - begun_s, 1)}


def main() -> int:
    """Return 0 where nothing but typed errors came of it."""
    parser = argparse.ArgumentParser(prog="formats", description=__doc__)
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--count", type=int, default=300, help="files of each format")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit_memory()
    found = [run(name, arguments.first, arguments.count) for name in arguments.formats]
    for row in found:
        print(json.dumps(row), flush=True)
    return 1 if any(row["untyped"] for row in found) else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())

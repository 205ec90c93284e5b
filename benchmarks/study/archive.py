"""Records of runs: one small file each, and a lock while a run is going on."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cells import Find
from runs import RunConfig

import distlion

REPOSITORY = Path(__file__).resolve().parents[2]
FORMAT = 1
# What a run's bits depend on; records and reports may change while runs go on.
_SOURCES = (
    *("src", "csrc", "pyproject.toml", "CMakeLists.txt"),
    *("benchmarks/study", "benchmarks/target", "benchmarks/periods", "benchmarks/quality"),
    *(
        "benchmarks/local_steps",
        "benchmarks/reliability",
        "benchmarks/finetune",
        "benchmarks/tokens",
    ),
)


class Records:
    """The folder of records.

    Args:
        folder: Made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return where the record of a run is, or will be."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a record; None where there is none."""
        try:
            record: dict[str, Any] = json.loads(self.path(name).read_text())
        except FileNotFoundError:
            return None
        return record

    def read_all(self) -> list[dict[str, Any]]:
        """Return all records that are there, by name."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]

    def write(self, config: RunConfig, outcome: dict[str, Any]) -> Path:
        """Write a record whole or not at all."""
        path = self.path(config.name)
        record = {"format": FORMAT, "name": config.name, **describe_place(), **outcome}
        draft = path.with_suffix(".draft")
        draft.write_text(_dump(record))
        os.replace(draft, path)
        return path

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Hold a run, so that no other process runs it; False where another does.

        The lock ends with its process, however that ends.
        """
        path = self.folder / f"{name}.lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
            path.unlink(missing_ok=True)


def remember(read: Find) -> Find:
    """Return a reader that reads each record once; absent ones are looked for anew."""
    known: dict[str, Mapping[str, Any]] = {}

    def find(name: str) -> Mapping[str, Any] | None:
        record = known.get(name) or read(name)
        if record is not None:
            known[name] = record
        return record

    return find


def _dump(record: dict[str, Any]) -> str:
    """Write a field a line: readable, and small."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def describe_place() -> dict[str, Any]:
    """Return commit, whether sources differ from it, CPU, versions and threads.

    Of the first call: a process goes on with the sources that it began with.
    """
    return {
        "commit": _ask_git("rev-parse", "HEAD"),
        "dirty": bool(_ask_git("status", "--porcelain", "--", *_SOURCES)),
        "cpu": _name_cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {
            "distlion": distlion.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def require_evidence() -> None:
    """End the program if what it is about to record would be none."""
    if describe_place()["dirty"]:
        sys.exit("sources differ from their commit, and such runs are no evidence: commit first")
    package = Path(distlion.__file__).resolve()
    if not package.is_relative_to(REPOSITORY):
        sys.exit(f"distlion is that of {package.parent}: install this checkout, {REPOSITORY}")


def _ask_git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _name_cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

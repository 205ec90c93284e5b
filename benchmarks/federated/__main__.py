"""Compare votes of clients with FedAvg, by the protocol in studies/.

    python benchmarks/federated                   # what a client costs; needs no data
    python benchmarks/federated run --images cifar-10-batches-py
    python benchmarks/federated time --images cifar-10-batches-py   # seconds of a few rounds
    python benchmarks/federated open              # which runs are open
    python benchmarks/federated report

``run`` goes on where it was stopped, and any number of processes share the work, one thread each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import study_path  # noqa: F401
import torch
from client_cost import describe as describe_cost
from client_cost import measure
from design import METHODS, PARTS, TUNING_SEED, Cell, Record, list_open
from images import Images

from report import describe
from training import train

RESULTS = Path(__file__).resolve().parents[1] / "results"


class Records:
    """A file for each run; an empty one is the claim of a process that is at it.

    Args:
        folder: Of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, cell: Cell) -> Record | None:
        """Return a record, or None."""
        path = self._folder / f"{cell.name}.json"
        if not path.exists():
            return None
        record: Record = json.loads(path.read_text())
        return record

    def make(self, cell: Cell, data: Images) -> Record | None:
        """Do a run, unless another process is at it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        claim = self._folder / f"{cell.name}.lock"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        try:
            record = {**dataclasses.asdict(cell), **train(cell, data)}
            draft = self._folder / f"{cell.name}.draft"
            draft.write_text(json.dumps(record, indent=1) + "\n")
            draft.rename(self._folder / f"{cell.name}.json")
        finally:
            claim.unlink()
        return record


def run(records: Records, data: Images) -> None:
    """Do what is open until nothing is, or all of it is in other hands."""
    while True:
        for cell in list_open(records.read):
            record = records.make(cell, data)
            if record is not None:
                print(f"{cell.name}: test {record['test']:.3f}, {record['cpu_s']} s", flush=True)
                break
        else:
            return


def time_rounds(data: Images) -> None:
    """Print seconds of ten rounds of each method."""
    for part in PARTS:
        for method in METHODS:
            found = train(Cell(method, 0.1, part, -1, 0.05, TUNING_SEED, 10), data)
            print(f"{method}, {part} a round: {found['cpu_s']} s, scores included", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", default="cost", choices=list(_CHOICES))
    parser.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where records and pages go")
    args = parser.parse_args(words)
    torch.set_num_threads(1)  # bits depend on it
    records = Records(args.results / "federated")
    if args.what in ("run", "time"):
        if args.images is None:
            parser.error(f"{args.what} needs --images")
        data = Images.read(args.images)
        if args.what == "run":
            run(records, data)
        else:
            time_rounds(data)
    elif args.what == "open":
        print("\n".join(cell.name for cell in list_open(records.read)))
    else:
        page = describe_cost(measure()) if args.what == "cost" else describe(records.read)
        name = "federated_cost.md" if args.what == "cost" else "federated.md"
        (args.results / name).write_text(page)
        print(page)
    return 0


_CHOICES = ("cost", "run", "time", "open", "report")

if __name__ == "__main__":
    sys.exit(main())

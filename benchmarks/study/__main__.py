"""Train all methods to real accuracy, by the protocol in studies/, and report.

    python benchmarks/study                     # every table and figure, from the records
    python benchmarks/study run --images cifar-10-batches-py --books FOLDER [--parts NAME ...]
    python benchmarks/study repeat RUN --images cifar-10-batches-py --books FOLDER

``run`` goes on where it was stopped, and any number of processes share the work: a run whose record
is there is not repeated, nor is one that another process is at. One thread each. ``repeat`` makes
one recorded run again and compares its bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from archive import Records, require_evidence
from cells import list_open
from plan import PARTS, Part
from runs import RunConfig
from sources import Data, make
from work import run_until_done

from report import write_report

RESULTS = Path(__file__).resolve().parents[1] / "results"


def run_all(records: Records, data: Data, parts: Sequence[Part]) -> None:
    """Do runs in the order of the protocol until none is left."""
    cells = [cell for part in parts for cell in part.cells if data.has(cell.setting.task)]
    run_until_done(
        lambda: [config for cell in cells for config in list_open(cell, records.read)],
        records,
        partial(make, data),
    )


# What must come out again; all else in a record is where and how fast it was made.
_BITS = ("data", "diverged", "train_loss", "validation", "test", "parameters_sha256")


def repeat(records: Records, data: Data, name: str) -> int:
    """Make a recorded run again; return 0 where it ends in the same bits, else 1."""
    recorded = records.read(name)
    if recorded is None:
        sys.exit(f"there is no record {records.path(name)}")
    outcome = make(data, RunConfig(**recorded["config"]))
    differing = [key for key in _BITS if outcome[key] != recorded[key]]
    print(f"{name}: " + (f"differs in {differing}" if differing else "the same bits"))
    return 1 if differing else 0


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS / "runs", help="their folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    commands = parser.add_subparsers(dest="command")
    needing_data = [commands.add_parser("run"), commands.add_parser("repeat")]
    commands.add_parser("report")
    for each in needing_data:
        each.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
        each.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    names = [part.name for part in PARTS]
    needing_data[0].add_argument("--parts", nargs="+", choices=names, default=names)
    needing_data[1].add_argument("name", help="of a record, without .json")
    args = parser.parse_args(words)
    records = Records(args.records)
    torch.set_num_threads(1)  # bits depend on it
    if args.command == "repeat":
        return repeat(records, Data(args.images, args.books), args.name)
    if args.command == "run":
        require_evidence()
        chosen = [part for part in PARTS if part.name in args.parts]
        run_all(records, Data(args.images, args.books), chosen)
        return 0
    print(write_report(records, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

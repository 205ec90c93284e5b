"""Compare cautious votes and their rivals with AdamW, by the protocol in docs/explanation.

    python benchmarks/quality                   # tables and picture, from the records
    python benchmarks/quality run --images cifar-10-batches-py --books FOLDER [--parts NAME ...]
    python benchmarks/quality open              # how many runs are open in each part

``run`` goes on where it was stopped, and any number of processes share the work: a run whose record
is there is not repeated, nor is one that another process is at. One thread each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import study_path  # noqa: F401
import torch
from archive import Records, require_evidence
from design import PARTS, list_open_runs
from pages import write_report
from runs import RunConfig
from sources import Data, make
from work import run_until_done

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS / "runs", help="their folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="write tables and picture from the records")
    commands.add_parser("open", help="count the runs that could be made now")
    run = commands.add_parser("run", help="tune and train with virtual workers")
    run.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    run.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    names = [part.name for part in PARTS]
    run.add_argument("--parts", nargs="+", choices=names, default=names)
    args = parser.parse_args(words)
    records = Records(args.records)
    if args.command == "open":
        for part in PARTS:
            print(f"{part.name}: {len(list_open_runs((part,), records.read))}")
        return 0
    if args.command != "run":
        print(write_report(records, args.results))
        return 0
    torch.set_num_threads(1)  # bits depend on it
    require_evidence()
    data = Data(args.images, args.books)
    chosen = tuple(part for part in PARTS if part.name in args.parts)

    def list_open() -> list[RunConfig]:
        return [run for run in list_open_runs(chosen, records.read) if data.has(run.task)]

    run_until_done(list_open, records, partial(make, data))
    return 0


if __name__ == "__main__":
    sys.exit(main())

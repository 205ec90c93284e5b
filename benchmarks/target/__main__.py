"""Measure the time to a target: seconds on a slow link until a test accuracy or loss is reached.

    python benchmarks/target                    # tables and figure, from the records
    python benchmarks/target run --images cifar-10-batches-py --books FOLDER
    python benchmarks/target time --images cifar-10-batches-py --books FOLDER
    python benchmarks/target whole --images cifar-10-batches-py --methods majority --link 100mbit

By the protocol in studies/. ``run`` tunes and trains with virtual workers; it goes on
where it was stopped, and any number of processes share the work. ``time`` measures steps in the
network lab, ``whole`` trains there from first step to last: both need Linux and root rights.
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
from cells import SEEDS
from curves import Data, make
from laboratory import save, time_steps, train_whole
from outcome import write_report
from settings import LINKS, METHODS, list_cells, list_open_runs
from work import run_until_done

RESULTS = Path(__file__).resolve().parents[1] / "results"


def run_all(records: Records, data: Data) -> None:
    """Do runs until none is left."""
    cells = [cell for task in data.tasks for cell in list_cells(task)]
    run_until_done(lambda: list_open_runs(cells, records.read), records, partial(make, data))


def time_all(folder: Path, data: Data, links: Sequence[str], repetitions: int) -> None:
    """Time the steps of all methods."""
    for task in data.tasks:
        for link in links:
            found = time_steps(task, data.folder(task), link, repetitions=repetitions)
            save(folder / f"steps_{task}_{link}.json", found)


def train_all_whole(records: Records, data: Data, args: argparse.Namespace) -> None:
    """Train whole runs."""
    for task in data.tasks:
        for method in args.methods:
            found = train_whole(
                records, task, data.folder(task), args.link, method=method, seed=args.seed
            )
            save(records.folder / f"whole_{task}_{method}_{args.link}_s{args.seed}.json", found)


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where all of it goes")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("run", help="tune and train with virtual workers")
    timing = commands.add_parser("time", help="time steps in the network lab")
    timing.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    timing.add_argument("--repetitions", type=int, default=10, help="blocks of each method")
    whole = commands.add_parser("whole", help="train in the network lab")
    whole.add_argument("--methods", nargs="+", choices=METHODS, required=True)
    whole.add_argument("--link", choices=LINKS, required=True)
    whole.add_argument("--seed", type=int, default=SEEDS[0])
    for each in commands.choices.values():
        each.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
        each.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    args = parser.parse_args(words)
    records = Records(args.results / "target")
    torch.set_num_threads(1)  # bits depend on it
    if args.command is None:
        print(write_report(records, args.results))
        return 0
    require_evidence()
    data = Data(args.images, args.books)
    if args.command == "run":
        run_all(records, data)
    elif args.command == "time":
        time_all(records.folder, data, args.links, args.repetitions)
    else:
        train_all_whole(records, data, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

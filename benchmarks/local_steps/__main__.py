"""Compare votes every H steps with others in equal time, by the protocol in studies/.

    python benchmarks/local_steps                   # tables and pictures, from the records
    python benchmarks/local_steps run --images cifar-10-batches-py --books FOLDER [--parts NAME ...]
    python benchmarks/local_steps open              # how many runs are open in each part
    python benchmarks/local_steps seconds --images cifar-10-batches-py --books FOLDER
    python benchmarks/local_steps inner-seconds --books FOLDER
    python benchmarks/local_steps inners            # the page on inner optimizers
    python benchmarks/local_steps late              # the page on later outcomes and parts
    python benchmarks/local_steps whole --books FOLDER --methods global-adamw local-8-scaled-plain

``run`` goes on where it was stopped, and any number of processes share the work: a run whose record
is there is not repeated, nor is one that another process is at. One thread each. ``seconds`` times
computing and exchanges on hosts of the network lab, ``whole`` trains there from first step to last:
both need Linux, root rights and an otherwise idle machine. ``inner-seconds`` times steps with each
inner optimizer, on one core of an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import target_path  # noqa: F401
import torch
from archive import Records, require_evidence
from choices import PARTS, list_open_runs
from contest import ALWAYS, LINKS, is_run
from curves import Data, make
from inner_page import write_inner_report
from inner_seconds import time_inners
from late import write_late_report
from page import write_report
from runs import RunConfig
from timing import time_all, train_whole
from work import run_until_done

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDER = "local_steps"


def run_all(
    records: Records, data: Data, names: Sequence[str], methods: Sequence[str] | None = None
) -> None:
    """Do runs of some parts, and of some methods or all, in order until none is left."""
    chosen = tuple(part for part in PARTS if part.name in names and part.task in data.tasks)

    def list_open() -> list[RunConfig]:
        found = list_open_runs(chosen, records.read)
        return [config for config in found if methods is None or config.method in methods]

    run_until_done(list_open, records, partial(make, data))


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    args = _make_parser().parse_args(words)
    records = Records(args.results / FOLDER)
    torch.set_num_threads(1)  # bits depend on it
    if args.command == "open":
        for part in PARTS:
            print(f"{part.name}: {len(part.list_open(records.read))}")
        return 0
    if args.command in (None, "report"):
        print(write_report(records, args.results))
        return 0
    if args.command == "inners":
        print(write_inner_report(records, args.results))
        return 0
    if args.command == "late":
        print(write_late_report(records, args.results))
        return 0
    require_evidence()
    data = Data(args.images, args.books)
    if args.command == "run":
        run_all(records, data, args.parts, args.methods)
    elif args.command == "inner-seconds":
        print(time_inners(records.folder, data, args.repetitions))
    elif args.command == "seconds":
        time_all(records.folder, data, args.links, args.repetitions)
    else:
        for method in args.methods:
            train_whole(records, data, method, link=args.link, seed=args.seed, is_long=args.long)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where all of it goes")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="write tables and pictures from the records")
    commands.add_parser("open", help="count the runs that could be made now")
    commands.add_parser("inners", help="write the page on inner optimizers from the records")
    commands.add_parser("late", help="write the page on later outcomes and parts that take turns")
    run = commands.add_parser("run", help="tune and train with virtual workers")
    names = [part.name for part in PARTS]
    run.add_argument("--parts", nargs="+", choices=names, default=names)
    run.add_argument("--methods", nargs="+", type=_read_method, help="methods to run; default: all")
    seconds = commands.add_parser("seconds", help="time computing and exchanges in the network lab")
    seconds.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    seconds.add_argument("--repetitions", type=int, default=8, help="of each contestant")
    steps = commands.add_parser("inner-seconds", help="time steps with each inner optimizer")
    steps.add_argument("--repetitions", type=int, default=8, help="of each inner optimizer")
    whole = commands.add_parser("whole", help="train whole runs on text in the network lab")
    whole.add_argument("--methods", nargs="+", type=_read_method, required=True)
    whole.add_argument("--link", choices=LINKS, default=LINKS[0])
    whole.add_argument("--seed", type=int, default=1)
    whole.add_argument("--long", action="store_true", help="three times as long as DDP")
    for each in (run, seconds, steps, whole):
        each.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
        each.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    return parser


def _read_method(word: str) -> str:
    if word not in ALWAYS and not is_run(word):
        raise argparse.ArgumentTypeError(f"there is no method {word!r}")
    return word


if __name__ == "__main__":
    sys.exit(main())

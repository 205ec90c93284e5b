"""Votes and AdamW on tokens, by the protocol in studies/.

    python benchmarks/tokens                                        # the report, from the records
    python benchmarks/tokens run --books FOLDER [--parts tuning short longer larger]
    python benchmarks/tokens look --books FOLDER --method orthogonal --lr 4e-3 [--embedding 4]
                                  [--beside embedding head] [--windows 16] [--steps 300]

``run`` makes the runs that have no record; any number of processes share them, one thread each.
``look`` prints the validation loss of one run, as it goes, and records nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import study_path  # noqa: F401
import torch
from archive import Records, remember, require_evidence
from study import CELLS, TUNING, list_runs, write_page
from work import perform

from training import METHODS, Run, train

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="write the report from the records")
    running = commands.add_parser("run", help="make the runs that have no record")
    running.add_argument("--books", type=Path, required=True, help="folder of *.txt, a book each")
    parts = ["tuning", *(cell.name for cell in CELLS)]
    running.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    looking = commands.add_parser("look", help="make one run, and print its loss")
    looking.add_argument("--books", type=Path, required=True, help="folder of *.txt, a book each")
    looking.add_argument("--method", choices=METHODS, required=True)
    looking.add_argument("--lr", type=float, required=True)
    looking.add_argument("--embedding", type=float, default=1.0, help="times the rate, of tokens")
    looking.add_argument("--head", type=float, default=1.0, help="times the rate, of the output")
    looking.add_argument("--ternary", action="store_true", help="TernaryVote for the embedding")
    beside = ("embedding", "head", "rest")
    looking.add_argument(
        "--beside", nargs="+", choices=beside, default=(), help="AdamW moves these"
    )
    looking.add_argument("--beside-lr", type=float, default=4e-3, help="its rate")
    looking.add_argument("--windows", type=int, default=16, help="in a step, of all workers")
    looking.add_argument("--tied", action="store_true", help="output weights are the embedding's")
    looking.add_argument("--seed", type=int, default=1)
    looking.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.command == "look":
        look(args, parser)
        return 0
    records = Records(RESULTS / "tokens")
    if args.command == "run":
        require_evidence()
        find = remember(records.read)
        for part in args.parts:
            cells = [cell for cell in CELLS if cell.name == part]
            runs = list_runs(cells[0], find) if cells else TUNING
            if not runs:
                print(f"{part}: rates are not tuned yet", flush=True)
            for run in runs:
                print(f"{run.name}: {do(run, args.books, records)}", flush=True)
    (RESULTS / "tokens.md").write_text(write_page(remember(records.read)))
    return 0


def do(run: Run, books: Path, records: Records) -> str:
    """Make a run and record it; return what became of it."""

    def make(_: object) -> dict[str, Any]:
        return {"settings": asdict(run), **train(run, books)}

    is_made = perform(records, cast(Any, run), make)
    record = records.read(run.name)
    if record is None:
        return "another process is at it"
    return f"{record['loss']:.4f}" + ("" if is_made else ", on record")


def look(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Make one run, and print its loss as it goes."""
    named = {field.name for field in fields(Run)}
    given = {name: value for name, value in vars(args).items() if name in named}
    run = Run(**given | {"beside": tuple(args.beside)})
    if run.method in ("adamw", "lion", "muon") and (run.ternary or run.beside):
        parser.error(f"--ternary and --beside go with votes, and {run.method} has none")
    train(run, args.books, show=lambda step, loss: print(f"step {step}: {loss:.4f}", flush=True))


if __name__ == "__main__":
    sys.exit(main())

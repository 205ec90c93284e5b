"""Compare cautious votes and their rivals with AdamW, by the protocol in studies/.

    python benchmarks/quality                   # tables and picture, from the records
    python benchmarks/quality run --images cifar-10-batches-py --books FOLDER [--parts NAME ...]
    python benchmarks/quality run ... --device cuda [--seconds S]       # many runs at a time
    python benchmarks/quality control ... [--seconds S]  # runs of a CPU again, on a CUDA device
    python benchmarks/quality open              # how many runs are open in each part

``run`` goes on where it was stopped, and any number of processes share the work: a run whose record
is there is not repeated, nor is one that another process is at. One thread each. A device takes one
process, which leaves out runs that have no form for a device.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import study_path  # noqa: F401
import torch
from archive import Records, remember, require_evidence
from controls import list_open_controls
from delay import DELAY_PARTS, leave_out_failed, write_delay_report
from design import PARTS, REPLIES, list_open_runs
from flat_methods import has_flat_form
from lanes import MOST_LANES, run_on_device
from orthogonal_design import ORTHOGONAL_PARTS
from orthogonal_pages import write_orthogonal_report
from pages import CONTROLS, write_report
from runs import RunConfig
from settings import BASES
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
    control = commands.add_parser("control", help="do runs of a CPU again, on a CUDA device")
    for each in (run, control):
        each.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
        each.add_argument("--books", type=Path, help="folder of *.txt, a book each")
        each.add_argument("--seconds", type=float, default=math.inf, help="of a device; then end")
    names = [part.name for part in PARTS]
    every = (*PARTS, REPLIES, *ORTHOGONAL_PARTS, *DELAY_PARTS)
    run.add_argument("--parts", nargs="+", choices=[part.name for part in every], default=names)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--lanes", type=int, help=f"runs at a time on a device ({MOST_LANES})")
    args = parser.parse_args(words)
    lanes = args.lanes if args.command == "run" else None
    if lanes is not None and (args.device != "cuda" or lanes < 1):
        parser.error(f"--lanes {lanes}: expected 1 or more, with --device cuda")
    records = Records(args.records)
    if args.command == "open":
        parts = leave_out_failed((*PARTS, *ORTHOGONAL_PARTS, *DELAY_PARTS), records.read)
        for part in parts:
            print(f"{part.name}: {len(list_open_runs((part,), records.read))}")
        return 0
    if args.command not in ("run", "control"):
        print(write_report(records, args.results))
        print(write_orthogonal_report(records, args.results))
        print(write_delay_report(records, args.results))
        return 0
    on_device = args.command == "control" or args.device == "cuda"
    torch.set_num_threads(1)  # bits depend on it
    require_evidence()
    data = Data(args.images, args.books, torch.device("cuda" if on_device else "cpu"))
    if args.command == "control":
        _run_controls(records, args.results, data, args.seconds)
        return 0
    chosen = tuple(part for part in every if part.name in args.parts)
    find = remember(records.read) if on_device else records.read

    def list_open() -> list[RunConfig]:
        parts = leave_out_failed(chosen, find)
        runs = [run for run in list_open_runs(parts, find) if data.has(run.task)]
        return [run for run in runs if has_flat_form(run)] if on_device else runs

    if on_device:
        run_on_device(list_open, records, data, args.seconds, lanes or MOST_LANES)
    else:
        run_until_done(list_open, records, partial(make, data))
    return 0


def _run_controls(records: Records, results: Path, data: Data, seconds: float) -> None:
    controls = Records(results / CONTROLS)
    find, find_control = remember(records.read), remember(controls.read)
    tasks = [task for task in BASES if data.has(task)]
    run_on_device(lambda: list_open_controls(tasks, find, find_control), controls, data, seconds)


if __name__ == "__main__":
    sys.exit(main())

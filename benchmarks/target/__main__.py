"""Measure the time to a target: seconds on a slow link until a test accuracy or loss is reached.

    python benchmarks/target                    # tables and figure, from the records
    python benchmarks/target run --images cifar-10-batches-py --books FOLDER

``run`` tunes and trains with virtual workers, by the protocol in docs/explanation. It goes on
where it was stopped, and any number of processes share the work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import study_path  # noqa: F401
import torch
from archive import Records, describe_place
from curves import Data, perform
from settings import list_cells, list_open_runs

RESULTS = Path(__file__).resolve().parents[1] / "results"
WAIT_S = 5.0


def run_all(records: Records, data: Data) -> None:
    """Do runs until none is left."""
    describe_place()
    cells = [cell for task in data.tasks for cell in list_cells(task)]
    while open_runs := list_open_runs(cells, records.read):
        for config in open_runs:
            if perform(records, data, config):
                print(config.name, file=sys.stderr, flush=True)
                break  # what comes next may depend on it
        else:
            time.sleep(WAIT_S)


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS / "target", help="their folder")
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run", help="tune and train with virtual workers")
    running.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    running.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    args = parser.parse_args(words)
    torch.set_num_threads(1)  # bits depend on it
    if args.command == "run":
        run_all(Records(args.records), Data(args.images, args.books))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare votes every H steps with DiLoCo, with votes in each step, and with DDP.

    python benchmarks/periods                   # tables and figure, from the records
    python benchmarks/periods run --books FOLDER
    python benchmarks/periods time --books FOLDER

By the protocol in studies/. ``run`` tunes and trains with virtual workers; it goes on
where it was stopped, and any number of processes share the work. ``time`` measures steps and
exchanges in the network lab, and needs Linux and root rights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import target_path  # noqa: F401
import torch
from archive import Records, require_evidence
from curves import Data, make
from design import LINKS, WORKERS, list_open_runs
from laboratory import run_on_hosts, save
from local_host import Job
from results import LOAD
from tables import write_report
from work import run_until_done

RESULTS = Path(__file__).resolve().parents[1] / "results"
_HOST = Path(__file__).with_name("local_host.py")


def time_all(folder: Path, books: Path, links: Sequence[str], repetitions: int) -> None:
    """Time steps and exchanges on each link."""
    load = round(os.getloadavg()[0], 2)
    for link in links:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "found.json"
            job = Job(books=str(books.resolve()), out=str(out), repetitions=repetitions)
            found = run_on_hosts(_HOST, json.dumps(asdict(job)), out, hosts=WORKERS, link=link)
        found["conditions"][LOAD] = load
        save(folder / f"steps_{link}.json", found)


def main(words: Sequence[str] | None = None) -> int:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where all of it goes")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="write tables and figure from the records")
    run = commands.add_parser("run", help="tune and train with virtual workers")
    timing = commands.add_parser("time", help="time steps and exchanges in the network lab")
    timing.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    timing.add_argument("--repetitions", type=int, default=8, help="blocks of each contestant")
    for each in (run, timing):
        each.add_argument("--books", type=Path, required=True, help="folder of *.txt, a book each")
    args = parser.parse_args(words)
    records = Records(args.results / "periods")
    torch.set_num_threads(1)  # bits depend on it
    if args.command not in ("run", "time"):
        print(write_report(records, args.results))
        return 0
    require_evidence()
    if args.command == "run":
        data = Data(None, args.books)
        run_until_done(lambda: list_open_runs(records.read), records, partial(make, data))
    else:
        time_all(records.folder, args.books, args.links, args.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

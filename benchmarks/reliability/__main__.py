"""Compare votes weighed by agreement with a majority, by the protocol in studies/.

    python benchmarks/reliability                 # the page, from the records
    python benchmarks/reliability run --images cifar-10-batches-py

``open`` lists runs without a record. ``run`` makes them; any number of processes share the work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import study_path  # noqa: F401
import torch
from archive import Records, require_evidence
from gap import describe_gap, list_gap
from option import EXCLUDING, ExcludingTrainer, describe_option, list_option
from protocol import describe, list_open
from runs import Reporter, RunConfig
from sources import Data
from unequal import UnequalTrainer, describe_unequal, is_unequal, list_unequal
from watched import WatchedTrainer
from work import run_until_done


def main(words: list[str] | None = None) -> None:
    """Parse, and do one thing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", default="report", choices=("report", "run", "open"))
    parser.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    place = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--results", type=Path, default=place, help="where records and page go")
    args = parser.parse_args(words)
    records, data = Records(args.results / "reliability"), Data(args.images, None)

    def make(config: RunConfig) -> dict[str, object]:
        task, digest = data.build(config)
        trainer = UnequalTrainer if is_unequal(config) else WatchedTrainer
        trainer = ExcludingTrainer if config.method == EXCLUDING else trainer
        return {"data": digest, **trainer(config, task, Reporter(config)).run()}

    def list_all() -> list[RunConfig]:
        others = list_unequal() + list_gap() + list_option()
        others = [run for run in others if records.read(run.name) is None]
        return others + list_open(records.read)

    if args.what == "run":
        torch.set_num_threads(1)  # bits depend on it
        require_evidence()
        run_until_done(list_all, records, make)
    elif args.what == "open":
        print("\n".join(run.name for run in list_all()))
    else:
        writers = (describe, describe_gap, describe_option, describe_unequal)
        pages = [write(records.read) for write in writers]
        (args.results / "reliability.md").write_text("\n".join(pages))


if __name__ == "__main__":
    main()

"""What each rule for another number of workers costs: validation loss after 100 more steps.

    python benchmarks/world_change.py [--seeds 5] [--results DIR]

Four virtual workers train an MLP on scikit-learn's digits for 100 steps at a total batch of 64; the
checkpoint goes on with other numbers of workers at the same total batch, under each rule, for 1, 10
and 100 steps. Data is even, or skewed by class: worker j of W draws from the j-th W-th of the
images sorted by class. Shown is the validation loss minus that of the four workers that went on
(mean and standard error over seeds).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import distlion
from distlion.checkpoint import WORLD_CHANGES

BEFORE, LOOKS, TOTAL_BATCH, SAVED_WORKERS = 100, (1, 10, 100), 64, 4
WORKERS = (2, 3, 8)


class Study:
    """One seed and split of the digits.

    Args:
        seed: Of model, split and batches.
        skewed: Whether workers draw from different classes.
    """

    def __init__(self, seed: int, *, skewed: bool) -> None:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
        labels = torch.tensor(digits.target)[order]
        self.test = images[1400:], labels[1400:]
        images, labels = images[:1400], labels[:1400]
        place = labels.argsort(stable=True) if skewed else torch.arange(len(labels))
        self.train = images[place], labels[place]
        self.seed = seed

    def build(self, workers: int) -> tuple[nn.Module, distlion.VirtualCluster]:
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        cluster = distlion.VirtualCluster(
            model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, workers=workers
        )
        return model, cluster

    def go_on(self, model: nn.Module, cluster: distlion.VirtualCluster, steps: int) -> None:
        images, labels = self.train
        share = len(labels) // cluster.workers
        for _ in range(steps):
            for worker in range(cluster.workers):
                step = cluster.committed_step
                generator = torch.Generator().manual_seed(10_000 * self.seed + 100 * step + worker)
                size = (TOTAL_BATCH // cluster.workers,)
                picked = worker * share + torch.randint(share, size, generator=generator)
                nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
                cluster.collect(worker)
            cluster.step()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        images, labels = self.test
        return float(nn.functional.cross_entropy(model(images), labels))

    def follow(self, folder: Path, workers: int, rule: Any) -> list[float]:
        """Return the losses at each look after a resume."""
        model, cluster = self.build(workers)
        distlion.load_checkpoint(folder, model, cluster, on_world_change=rule)
        losses = []
        for look in LOOKS:
            self.go_on(model, cluster, BEFORE + look - cluster.committed_step)
            losses.append(self.loss(model))
        return losses


def run(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for skewed in (False, True):
        gaps: dict[tuple[int, str], list[list[float]]] = {}
        for seed in range(seeds):
            study = Study(seed, skewed=skewed)
            with tempfile.TemporaryDirectory() as folder:
                model, cluster = study.build(SAVED_WORKERS)
                study.go_on(model, cluster, BEFORE)
                distlion.save_checkpoint(folder, model, cluster)
                expected = study.follow(Path(folder), SAVED_WORKERS, "raise")
                for workers in WORKERS:
                    for rule in WORLD_CHANGES[1:]:
                        found = study.follow(Path(folder), workers, rule)
                        gap = [a - b for a, b in zip(found, expected, strict=True)]
                        gaps.setdefault((workers, rule), []).append(gap)
        for (workers, rule), all_gaps in gaps.items():
            columns = list(zip(*all_gaps, strict=True))
            rows.append(
                {
                    "data": "skewed" if skewed else "even",
                    "workers": workers,
                    "rule": rule,
                    "mean": [statistics.mean(column) for column in columns],
                    "error": [statistics.stdev(column) / len(column) ** 0.5 for column in columns],
                }
            )
    return rows


def format_table(record: dict[str, Any]) -> str:
    head = "| data | workers | rule | " + " | ".join(f"{look} steps" for look in LOOKS) + " |\n"
    lines = []
    for row in record["rows"]:
        cells = [f"{m:+.4f} +- {e:.4f}" for m, e in zip(row["mean"], row["error"], strict=True)]
        lines.append(f"| {row['data']} | {row['workers']} | {row['rule']} | {' | '.join(cells)} |")
    conditions = "\n".join(f"- {key}: {value}" for key, value in record["conditions"].items())
    title = "# Another number of workers\n\nMade by `python benchmarks/world_change.py`.\n\n"
    rule = "| --- | ---: | --- | " + " | ".join("---:" for _ in LOOKS) + " |\n"
    return f"{title}{conditions}\n\n{head}{rule}" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, help="folder of world_change.json and .md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "conditions": {
            "date": dt.date.today().isoformat(),
            "torch": torch.__version__,
            "saved": f"{SAVED_WORKERS} workers, after {BEFORE} steps",
            "seeds": arguments.seeds,
            "unit": "nats of validation loss beyond the four workers that went on",
        },
        "rows": run(arguments.seeds),
    }
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "world_change.json").write_text(json.dumps(record, indent=1) + "\n")
        (arguments.results / "world_change.md").write_text(format_table(record))
    print(format_table(record))


if __name__ == "__main__":
    main()

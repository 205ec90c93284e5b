"""Train 8 workers of which some leave and others come, beside 8 that stay.

    python benchmarks/members.py run --books FOLDER    # does what is open; several may run at once
    python benchmarks/members.py report                # writes benchmarks/results/members.md

studies/changing-members.md says what is asked, what is fixed, and how it is decided.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import distlion
from distlion.step.newcomers import Newcomers
from distlion.votes import Aggregation

sys.path.append(str(Path(__file__).resolve().parent / "study"))
from schedule import DECAY_PER_STEP, rate_factor
from text import Novels, TextTask

RESULTS = Path(__file__).resolve().parent / "results"
RECORDS = RESULTS / "members"
WORKERS, WINDOWS, STEPS, SEEDS = 8, 64, 1000, (1, 2, 3)
EVERY, VACANT = 200, 50
SIZE = {"width": 64, "layers": 2, "heads": 4, "context": 64}
BETAS = (0.9, 0.95)
ARMS: tuple[Newcomers | None, ...] = (None, "zeros", "donor", "mean")
"""None stands for 8 workers that stay."""
MARGIN, WORTH = 0.01, 0.003
T_95 = 2.306
"""Of Student's distribution with 8 degrees of freedom: nine pairs."""


@dataclass(frozen=True)
class Contender:
    """A rule with the rate that was tuned for it with 4 workers.

    Attributes:
        aggregation, cautious, lr: As for ``DistributedLion``.
    """

    aggregation: Aggregation
    cautious: bool
    lr: float


CONTENDERS = {
    "majority": Contender(distlion.MajorityVote(), cautious=False, lr=1e-3),
    "cautious": Contender(distlion.MajorityVote(), cautious=True, lr=4e-3),
    "feedback-2-cautious": Contender(distlion.FeedbackVote(bits=2), cautious=True, lr=2e-3),
}


@dataclass(frozen=True)
class Cell:
    """A run.

    Attributes:
        rule: Of ``CONTENDERS``.
        newcomers: What they begin with; None: nobody leaves or comes.
        seed: Of weights, windows and coins.
    """

    rule: str
    newcomers: Newcomers | None
    seed: int

    @property
    def path(self) -> Path:
        """Path of its record."""
        return RECORDS / f"{self.rule}_{self.newcomers or 'fixed'}_s{self.seed}.json"


def list_cells() -> list[Cell]:
    """List all runs, seed by seed."""
    return [Cell(rule, arm, seed) for seed in SEEDS for rule in CONTENDERS for arm in ARMS]


def list_members(step: int) -> tuple[int, ...]:
    """Return who votes in a step: the oldest leaves every 200 steps; 50 later somebody comes."""
    left, came = step // EVERY, (step - VACANT) // EVERY if step >= VACANT else 0
    return tuple(range(left, WORKERS + came))


def train(cell: Cell, books: Novels) -> dict[str, Any]:
    """Do a run; return its record."""
    contender = CONTENDERS[cell.rule]
    task = TextTask(books, batch=WINDOWS, workers=WORKERS, seed=cell.seed, **SIZE)
    model = task.build_model()
    cluster = distlion.VirtualCluster(
        model.named_parameters(),
        lr=contender.lr,
        betas=BETAS,
        weight_decay=DECAY_PER_STEP / contender.lr,
        workers=WORKERS,
        aggregation=contender.aggregation,
        cautious=contender.cautious,
        seed=cell.seed,
    )
    members, changes, began_s = tuple(range(WORKERS)), 0, time.process_time()
    for step in range(STEPS):
        wanted = members if cell.newcomers is None else list_members(step)
        if cell.newcomers is not None and wanted != members:
            cluster.change_workers(wanted, newcomers=cell.newcomers)
            members, changes = wanted, changes + 1
        for group in cluster.param_groups:
            group["lr"] = contender.lr * rate_factor(step, STEPS)
        # A vacant place has no batch: the step sees 56 windows instead of 64.
        for place, (inputs, targets) in enumerate(task.batches(step)[: len(members)]):
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            cluster.collect(place)
        cluster.step()
    return {
        **asdict(cell),
        "changes": changes,
        "validation": task.validate(model).loss,
        "test": task.test(model).loss,
        "data": books.digest,
        "torch": torch.__version__,
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def run(folder: Path) -> None:
    """Do what is open; a run that another process is at is left to it."""
    torch.set_num_threads(1)
    RECORDS.mkdir(parents=True, exist_ok=True)
    books = Novels.read(folder, context=SIZE["context"])
    cells = list_cells()
    for number, cell in enumerate(cells, 1):
        claim = cell.path.with_suffix(".claim")
        if cell.path.exists():
            continue
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        try:
            record = train(cell, books)
            cell.path.write_text(json.dumps(record, indent=1) + "\n")
        finally:
            claim.unlink()
        print(f"{number}/{len(cells)} {cell.path.stem}: test {record['test']:.3f}", flush=True)


def read() -> dict[Cell, dict[str, Any]]:
    """Read all records; every run must be there."""
    missing = [cell.path.name for cell in list_cells() if not cell.path.exists()]
    if missing:
        raise SystemExit(f"{len(missing)} runs are open, {missing[0]} first: run them before")
    return {cell: json.loads(cell.path.read_text()) for cell in list_cells()}


def choose_default(records: dict[Cell, dict[str, Any]]) -> Newcomers:
    """Return the choice with the lowest validation loss; zeros unless that is worth it."""
    means = {
        arm: statistics.fmean(
            r["validation"] for cell, r in records.items() if cell.newcomers == arm
        )
        for arm in ARMS
        if arm is not None
    }
    best = min(means, key=lambda arm: means[arm])
    return best if means["zeros"] - means[best] > WORTH else "zeros"


def compare(
    records: dict[Cell, dict[str, Any]], arm: Newcomers, rules: Sequence[str] = tuple(CONTENDERS)
) -> list[float]:
    """Return test losses of an arm less those of workers that stay, pair by pair."""
    return [
        records[Cell(rule, arm, seed)]["test"] - records[Cell(rule, None, seed)]["test"]
        for rule in rules
        for seed in SEEDS
    ]


def describe(records: dict[Cell, dict[str, Any]]) -> str:
    """Write the page."""
    default = choose_default(records)
    lines = [
        "# Workers that change, and workers that stay",
        "",
        f"8 workers, {STEPS:,} steps, {len(SEEDS)} seeds, by the "
        "[protocol](../../studies/changing-members.md).",
        "Test loss in nats a byte, mean over seeds.",
        "",
        "| rule | 8 that stay | zeros | donor | mean |",
        "|---|---:|---:|---:|---:|",
    ]
    for rule in CONTENDERS:
        cells = [
            statistics.fmean(records[Cell(rule, arm, seed)]["test"] for seed in SEEDS)
            for arm in ARMS
        ]
        lines.append(f"| {rule} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    lines += [
        "",
        "| newcomers | further than workers that stay, nine pairs | 95 % interval | "
        f"within {MARGIN:g}? |",
        "|---|---:|---:|---|",
    ]
    for arm in ARMS[1:]:
        assert arm is not None
        found = compare(records, arm)
        mean, half = statistics.fmean(found), T_95 * statistics.stdev(found) / len(found) ** 0.5
        within = "yes" if mean + half < MARGIN else "not shown"
        low, high = mean - half, mean + half
        lines.append(f"| {arm} | {mean:+.4f} | {low:+.4f} to {high:+.4f} | {within} |")
    lines += ["", f'By the rule of the protocol, `newcomers="{default}"` is the default.', ""]
    return "\n".join(lines)


def main() -> None:
    """Read the command line, and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--books", type=Path, help="folder of the novels, a text file each")
    args = parser.parse_args()
    if args.what == "run":
        if args.books is None:
            parser.error("run needs --books")
        run(args.books)
    else:
        (RESULTS / "members.md").write_text(describe(read()))


if __name__ == "__main__":
    main()

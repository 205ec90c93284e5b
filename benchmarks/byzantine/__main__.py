"""Let b of N workers be Byzantine in every step, and measure how each rule withstands them.

Attacks, on the gradient that a Byzantine worker hands in: "flip" sends its negative, "randomize" a
Gaussian one of equal norm (for each tensor), "scale" -100 times it. A worker that always flips its
gradients has the negative momentum too, hence exactly flipped votes. The task is a small ViT on
scikit-learn's digits; workers are virtual. Each method's learning rate is the best of a grid
without Byzantine workers, judged on other held-out images than those reported.

    python benchmarks/byzantine [--workers 9] [--seeds 3] [--steps 100] [--jobs 1]
        [--results FOLDER]

Writes byzantine.json, .md and .png into FOLDER: benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from attackers import (
    ATTACKS,
    BATCH_SIZE,
    METHODS,
    VIT,
    WARM_UP_STEPS,
    WEIGHT_DECAY,
    Outcome,
    Run,
    build_model,
    train,
)
from summary import draw, summarize, write_markdown

RESULTS = Path(__file__).resolve().parents[1] / "results"
BYZANTINE = (0, 1, 2, 3, 4)
LR_GRID = (1e-3, 2e-3, 4e-3, 8e-3)
# Of the runs that choose a learning rate: none that is reported.
TUNING_SEED = 1000


def train_all(runs: Sequence[Run], jobs: int, what: str) -> Iterator[tuple[Run, Outcome]]:
    """Train, in as many processes; report where it is on stderr."""
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        outcomes = map(train, runs)
        if jobs > 1:
            pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
            outcomes = stack.enter_context(pool).map(train, runs)
        for done, pair in enumerate(zip(runs, outcomes, strict=True), start=1):
            elapsed_s = time.monotonic() - started_s
            left_s = elapsed_s / done * (len(runs) - done)
            line = f"{what} {done}/{len(runs)}, {elapsed_s:.0f} s, {left_s:.0f} s left"
            print(line, file=sys.stderr, flush=True)
            yield pair


def plan_tuning(workers: int, steps: int) -> list[Run]:
    return [
        Run(method, "flip", 0, workers, TUNING_SEED, lr, steps)
        for method in METHODS
        for lr in LR_GRID
    ]


def choose_lrs(outcomes: Sequence[tuple[Run, Outcome]]) -> dict[str, float]:
    """Return the lr with the least validation loss for each method; the lower of equals."""
    best: dict[str, tuple[float, float]] = {}
    for run, outcome in outcomes:
        found = (outcome.validation_loss, run.lr)
        best[run.method] = min(best.get(run.method, found), found)
    return {method: lr for method, (_, lr) in best.items()}


def plan_study(lrs: dict[str, float], workers: int, seeds: int, steps: int) -> list[Run]:
    """List all runs; those without a Byzantine worker are there once, under the first attack."""
    first = next(iter(ATTACKS))
    return [
        Run(method, attack, byzantine, workers, seed, lrs[method], steps)
        for method in METHODS
        for attack in ATTACKS
        for byzantine in BYZANTINE
        for seed in range(seeds)
        if byzantine or attack == first
    ]


def read_conditions(args: argparse.Namespace, lrs: dict[str, float]) -> dict[str, Any]:
    command = f"--workers {args.workers} --seeds {args.seeds} --steps {args.steps}"
    parameters = sum(param.numel() for param in build_model(0).parameters())
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/byzantine {command} --jobs {args.jobs}",
        "task": f"scikit-learn digits, ViT of {parameters} parameters, {VIT['num_hidden_layers']} "
        f"layers, patches of {VIT['patch_size']} x {VIT['patch_size']}",
        "workers": args.workers,
        "batch_size": f"{BATCH_SIZE} a worker; each has its own {args.workers}th of the images",
        "steps": args.steps,
        "seeds": args.seeds,
        "lr": ", ".join(f"{method}: {lr:g}" for method, lr in lrs.items())
        + f"; the best of {', '.join(f'{lr:g}' for lr in LR_GRID)} for each, one run each without "
        "Byzantine workers, of another seed",
        "schedule": f"{WARM_UP_STEPS} steps of warm-up, then linearly to 0",
        "weight_decay": WEIGHT_DECAY,
        "betas": "0.9, 0.99",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    tuned = list(train_all(plan_tuning(args.workers, args.steps), args.jobs, "tuning"))
    lrs = choose_lrs(tuned)
    runs = plan_study(lrs, args.workers, args.seeds, args.steps)
    outcomes = list(train_all(runs, args.jobs, "study"))
    conditions = read_conditions(args, lrs)
    conditions["wall_seconds"] = round(time.monotonic() - started_s)
    if args.jobs == 1:
        conditions["processor_seconds"] = round(time.process_time())
    result = {
        "conditions": conditions,
        "summary": summarize(outcomes),
        "tuning": [asdict(run) | asdict(outcome) for run, outcome in tuned],
        "runs": [asdict(run) | asdict(outcome) for run, outcome in outcomes],
    }
    file = args.results / "byzantine.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(write_markdown(result))
    draw(result).savefig(file.with_suffix(".png"))
    print(write_markdown(result))


if __name__ == "__main__":
    main()

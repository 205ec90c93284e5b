"""Watch Lion with weight decay w solve min f(x) subject to |x| <= 1/w, under every rule.

f is a convex quadratic whose solution is known: half of its elements lie on the edge of the box.
Virtual workers see its gradient with noise of their own; in one scenario they also have different
data, so that their gradients differ for good. Measured in every step, with the exact gradient g:

    S(x) = sum_k |g_k| + w x_k g_k     0 or more inside the box, and 0 only at a solution
    distance to the solution           root mean square over elements

and, from a start far outside, by which factor the distance to the box shrinks in each step. A seed
draws the problem, what workers' data differ by, and the noise.

    python benchmarks/theory [--steps 1000] [--lr 0.005] [--seeds 3] [--results FOLDER]

Writes theory.json, .md and .png into FOLDER: benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from problem import SCENARIOS, Problem, Scenario, draw_shifts, make_problem
from theory_report import LAST, SHOWN, draw, write_markdown
from torch import Tensor, nn

from distlion.virtual import VirtualCluster
from distlion.votes import Aggregation, Average, MajorityVote, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.ternary import TernaryVote

RESULTS = Path(__file__).resolve().parents[1] / "results"
ELEMENTS = 256
WEIGHT_DECAY = 2.0
LR = 5e-3
BETAS = (0.9, 0.99)
NOISE = 1.0
SEEDS = 3
# Of a curve, so many points are kept.
POINTS = 100
OUTSIDE, OUTSIDE_STEPS = 20.0, 200

RULES: dict[str, Aggregation] = {
    "FullPrecision()": FullPrecision(),
    "MajorityVote()": MajorityVote(),
    "MajorityVote(tie='zero')": MajorityVote(tie="zero"),
    "TernaryVote()": TernaryVote(),
    "Average()": Average(),
    "QuantizedVote(bits=2)": QuantizedVote(bits=2),
    "QuantizedVote(bits=4)": QuantizedVote(bits=4),
    "QuantizedVote(bits=4, norm='linf')": QuantizedVote(bits=4, norm="linf"),
}


def run(
    problem: Problem,
    scenario: Scenario,
    rule: Aggregation,
    *,
    start: Tensor,
    steps: int,
    lr: float = LR,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Train; return S, the error and the distance to the box before each step and at the end."""
    n = len(start)
    shifts = draw_shifts(scenario, n, seed=3 * seed + 1)
    generator = torch.Generator().manual_seed(3 * seed + 2)
    param = nn.Parameter(start.float())
    cluster = VirtualCluster(
        [param],
        lr=lr,
        betas=BETAS,
        weight_decay=1.0 / problem.bound,
        workers=scenario.workers,
        aggregation=rule,
        seed=seed,
    )
    columns: dict[str, list[float]] = {"surrogate": [], "error": [], "outside": []}
    for step in range(steps + 1):
        x = param.detach().double()
        columns["surrogate"].append(problem.surrogate(x))
        columns["error"].append(problem.error(x))
        columns["outside"].append(problem.outside(x))
        if step == steps:
            break
        noise = torch.randn(scenario.workers, n, generator=generator, dtype=torch.float64)
        grads = (problem.gradient(x) + shifts + NOISE * noise).float()
        for worker, grad in enumerate(grads):
            param.grad = grad
            cluster.collect(worker)
        cluster.step()
    return columns


def summarize(columns: dict[str, list[float]]) -> dict[str, Any]:
    """Reduce a run to its curves, its mean S, and its end."""
    steps = len(columns["surrogate"]) - 1
    last = max(1, round(LAST * steps))
    every = max(1, steps // POINTS)
    return {
        "start_surrogate": columns["surrogate"][0],
        "mean_surrogate": math.fsum(columns["surrogate"]) / (steps + 1),
        "final_surrogate": math.fsum(columns["surrogate"][-last:]) / last,
        "final_error": math.fsum(columns["error"][-last:]) / last,
        "least_surrogate": min(columns["surrogate"]),
        "most_outside": max(columns["outside"]),
        "curves": {
            "step": list(range(0, steps + 1, every)),
            **{name: [float(f"{v:.5g}") for v in columns[name][::every]] for name in columns},
        },
    }


def combine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Reduce the runs of all seeds to means, with the standard deviations of what tables show."""
    row: dict[str, Any] = {}
    for name in ("start_surrogate", *SHOWN):
        values = [each[name] for each in runs]
        row[name] = statistics.fmean(values)
        row[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
    curves = [each["curves"] for each in runs]
    return row | {
        "least_surrogate": min(each["least_surrogate"] for each in runs),
        "most_outside": max(each["most_outside"] for each in runs),
        "curves": {
            name: [
                statistics.fmean(points) for points in zip(*(c[name] for c in curves), strict=True)
            ]
            for name in curves[0]
        },
    }


def shrink_factors(outside: list[float]) -> list[float]:
    """Return by which factor the distance to the box changed in each step."""
    return [after / before for before, after in pairwise(outside)]


def measure(steps: int, lr: float = LR, n: int = ELEMENTS, *, seeds: int = SEEDS) -> dict[str, Any]:
    problems = [make_problem(n, 1.0 / WEIGHT_DECAY, seed=3 * seed) for seed in range(seeds)]
    scenarios: dict[str, dict[str, Any]] = {}
    for scenario in SCENARIOS:
        # One worker does the same steps under every rule: nothing is voted on.
        rules = RULES if scenario.workers > 1 else dict(list(RULES.items())[:1])
        scenarios[scenario.name] = {}
        for name, rule in rules.items():
            started_s = time.perf_counter()
            scenarios[scenario.name][name] = combine(
                [
                    summarize(
                        run(
                            problem,
                            scenario,
                            rule,
                            start=torch.zeros(n),
                            steps=steps,
                            lr=lr,
                            seed=seed,
                        )
                    )
                    for seed, problem in enumerate(problems)
                ]
            )
            seconds = time.perf_counter() - started_s
            print(f"{scenario.name}: {name} {seconds:.1f} s", file=sys.stderr, flush=True)
    factors = {}
    for name, rule in RULES.items():
        found, last = [], []
        for seed, problem in enumerate(problems):
            start = OUTSIDE * problem.solution.sign() * problem.bound
            columns = run(
                problem, SCENARIOS[1], rule, start=start, steps=OUTSIDE_STEPS, lr=lr, seed=seed
            )
            found += shrink_factors(columns["outside"])
            last.append(columns["outside"][-1])
        factors[name] = {"largest": max(found), "last_distance": max(last)}
    return {"scenarios": scenarios, "from_outside": factors}


def read_conditions(steps: int, lr: float = LR, *, seeds: int = SEEDS) -> dict[str, Any]:
    return {
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=RESULTS,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip(),
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/theory --steps {steps} --lr {lr} --seeds {seeds}",
        "elements": ELEMENTS,
        "lr": lr,
        "weight_decay": WEIGHT_DECAY,
        "betas": "0.9, 0.99",
        "noise": f"Gaussian, standard deviation {NOISE} in each worker's gradient",
        "start": f"0; far outside: {OUTSIDE:g} / weight_decay, {OUTSIDE_STEPS} steps, 4 workers",
        "seeds": seeds,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    started_s = time.process_time()
    measured = measure(args.steps, args.lr, seeds=args.seeds)
    conditions = read_conditions(args.steps, args.lr, seeds=args.seeds)
    conditions["processor_seconds"] = round(time.process_time() - started_s)
    file = args.results / "theory.json"
    file.write_text(json.dumps({"conditions": conditions, **measured}) + "\n")
    result = json.loads(file.read_text())
    file.with_suffix(".md").write_text(write_markdown(result))
    draw(result).savefig(file.with_suffix(".png"))
    print(write_markdown(result))


if __name__ == "__main__":
    main()

"""Watch Lion with weight decay w solve min f(x) subject to |x| <= 1/w, under every rule.

f is a convex quadratic whose solution is known: half of its coordinates lie on the edge of the box.
Virtual workers see its gradient with noise of their own; in one scenario they also have different
data, so that their gradients differ for good. Measured in every step, with the exact gradient g:

    S(x) = sum_k |g_k| + w x_k g_k     0 or more inside the box, and 0 only at a solution
    distance to the solution           root mean square over coordinates

and, from a start far outside, by which factor the distance to the box shrinks in each step.

    python benchmarks/theory.py [--steps 1000] [--lr 0.005] [--results FOLDER]

Writes theory.json, .md and .png into FOLDER: benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torch import Tensor, nn

from distlion.aggregation import (
    Aggregation,
    Average,
    FullPrecision,
    MajorityVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.virtual import VirtualCluster

RESULTS = Path(__file__).resolve().parent / "results"
COORDINATES = 256
WEIGHT_DECAY = 2.0
LR = 5e-3
NOISE = 1.0
SEED = 0
# Of all steps: what counts as the end.
LAST = 0.1
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
# Color, line and marker; those that stand beside each other differ in gray too. TernaryVote moves
# as MajorityVote(tie='zero') does, where no direction is ever exactly 0.
STYLES: dict[str, tuple[str, Any, str]] = {
    "FullPrecision()": ("#000000", "-", ""),
    "MajorityVote()": ("#d55e00", "-", "o"),
    "MajorityVote(tie='zero')": ("#e69f00", "--", "s"),
    "Average()": ("#0072b2", "-", "^"),
    "QuantizedVote(bits=2)": ("#56b4e9", ":", "v"),
    "QuantizedVote(bits=4)": ("#009e73", "-.", "D"),
    "QuantizedVote(bits=4, norm='linf')": ("#cc79a7", (0, (6, 2)), "x"),
}
LABELS = {"MajorityVote(tie='zero')": "MajorityVote(tie='zero'), TernaryVote()"}


@dataclass(frozen=True)
class Scenario:
    """Who sees what.

    Attributes:
        name: As in the tables.
        workers: N.
        spread: How far the workers' gradients lie apart for good; they add up to the exact one.
    """

    name: str
    workers: int
    spread: float = 0.0


SCENARIOS = (
    Scenario("1 worker", 1),
    Scenario("4 workers", 4),
    Scenario("16 workers", 16),
    Scenario("16 workers, different data", 16, spread=1.0),
)


@dataclass(frozen=True)
class Problem:
    """A convex quadratic and its minimizer in the box |x| <= bound, float64.

    Equation:
        f(x) = (x - s)' H (x - s) / 2 + p' (x - s)
        s solution; p_k is 0 where |s_k| < bound, and against the sign of s_k on the edge: these are
        the conditions of Karush, Kuhn and Tucker, and H is positive definite.
    """

    hessian: Tensor
    solution: Tensor
    pull: Tensor
    bound: float

    def gradient(self, x: Tensor) -> Tensor:
        return self.hessian @ (x - self.solution) + self.pull

    def surrogate(self, x: Tensor) -> float:
        """Compute S(x)."""
        g = self.gradient(x)
        return float((g.abs() + x * g / self.bound).sum())

    def error(self, x: Tensor) -> float:
        return float((x - self.solution).square().mean().sqrt())

    def outside(self, x: Tensor) -> float:
        """Return the largest distance of a coordinate to the box."""
        return float((x.abs() - self.bound).clamp(min=0).max())


def make_problem(n: int, bound: float, *, seed: int) -> Problem:
    """Draw a quadratic with eigenvalues 0.05 ... 1; every second coordinate ends on the edge."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    eigenvalues = torch.logspace(math.log10(0.05), 0.0, n, dtype=torch.float64)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    at_edge = torch.arange(n) % 2 == 0
    within = 0.8 * torch.rand(n, generator=generator, dtype=torch.float64)
    size = torch.rand(n, generator=generator, dtype=torch.float64)
    solution = bound * signs * torch.where(at_edge, torch.ones_like(within), within)
    pull = torch.where(at_edge, -signs * (0.1 + 0.4 * size), torch.zeros_like(size))
    return Problem((q * eigenvalues) @ q.T, solution, pull, bound)


def draw_shifts(scenario: Scenario, n: int, *, seed: int) -> Tensor:
    """Draw what each worker's gradient is off by for good: (workers, n), skewed, adding up to 0."""
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.empty(scenario.workers, n, dtype=torch.float64).exponential_(generator=generator)
    return scenario.spread * (shifts - shifts.mean(dim=0))


def run(
    problem: Problem,
    scenario: Scenario,
    rule: Aggregation,
    *,
    start: Tensor,
    steps: int,
    lr: float = LR,
) -> dict[str, list[float]]:
    """Train; return S, the error and the distance to the box before each step and at the end."""
    n = len(start)
    shifts = draw_shifts(scenario, n, seed=SEED + 1)
    generator = torch.Generator().manual_seed(SEED + 2)
    param = nn.Parameter(start.float())
    cluster = VirtualCluster(
        [param],
        lr=lr,
        weight_decay=1.0 / problem.bound,
        workers=scenario.workers,
        aggregation=rule,
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


def shrink_factors(outside: list[float]) -> list[float]:
    """Return by which factor the distance to the box changed in each step."""
    return [after / before for before, after in pairwise(outside)]


def measure(steps: int, lr: float = LR, n: int = COORDINATES) -> dict[str, Any]:
    problem = make_problem(n, 1.0 / WEIGHT_DECAY, seed=SEED)
    scenarios = {}
    for scenario in SCENARIOS:
        # One worker does the same steps under every rule: nothing is voted on.
        rules = RULES if scenario.workers > 1 else dict(list(RULES.items())[:1])
        scenarios[scenario.name] = {}
        for name, rule in rules.items():
            started_s = time.perf_counter()
            columns = run(problem, scenario, rule, start=torch.zeros(n), steps=steps, lr=lr)
            scenarios[scenario.name][name] = summarize(columns)
            seconds = time.perf_counter() - started_s
            print(f"{scenario.name}: {name} {seconds:.1f} s", file=sys.stderr, flush=True)
    factors = {}
    start = OUTSIDE * problem.solution.sign() * problem.bound
    for name, rule in RULES.items():
        columns = run(problem, SCENARIOS[1], rule, start=start, steps=OUTSIDE_STEPS, lr=lr)
        found = shrink_factors(columns["outside"])
        factors[name] = {"largest": max(found), "last_distance": columns["outside"][-1]}
    return {"scenarios": scenarios, "from_outside": factors}


def read_conditions(steps: int, lr: float = LR) -> dict[str, Any]:
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/theory.py --steps {steps} --lr {lr}",
        "coordinates": COORDINATES,
        "lr": lr,
        "weight_decay": WEIGHT_DECAY,
        "betas": "0.9, 0.99",
        "noise": f"Gaussian, standard deviation {NOISE} in each worker's gradient",
        "start": f"0; far outside: {OUTSIDE:g} / weight_decay, {OUTSIDE_STEPS} steps, 4 workers",
        "seeds": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def write_markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Lion solves a problem inside a box",
        "",
        "Made by `python benchmarks/theory.py` from `theory.json`.",
        "",
        *(f"- {name.replace('_', ' ')}: {v}" for name, v in result["conditions"].items()),
        "",
        "![S(x) and the distance to the solution over steps](theory.png)",
        "",
        "S(x) = sum |g| + w x g, g the exact gradient. End: mean of the last "
        f"{LAST:.0%} of the steps. Error: root mean square distance to the known solution.",
        "",
        "| workers | rule | S, mean of all steps | S, end | error, end |",
        "|---|---|---|---|---|",
    ]
    for scenario, rules in result["scenarios"].items():
        for name, row in rules.items():
            shown = "every rule" if len(rules) == 1 else f"`{name}`"
            lines.append(
                f"| {scenario} | {shown} | {row['mean_surrogate']:.2f} | "
                f"{row['final_surrogate']:.3f} | {row['final_error']:.4f} |"
            )
    rows = [row for rules in result["scenarios"].values() for row in rules.values()]
    outside = result["from_outside"].values()
    factor = 1 - result["conditions"]["lr"] * WEIGHT_DECAY
    lines += [
        "",
        f"Least S of all steps: {min(row['least_surrogate'] for row in rows):.3f}. Farthest "
        f"outside the box: {max(row['most_outside'] for row in rows):.2g}.",
        "",
        "From far outside, the distance of the farthest coordinate to the box: in no step and",
        f"under no rule multiplied by more than {max(row['largest'] for row in outside):.7f} "
        f"(1 - lr * weight_decay = {factor:g}, before rounding).",
        "",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """Draw S above and the error below, a column for each scenario."""
    scenarios = result["scenarios"]
    figure = Figure(figsize=(3.3 * len(scenarios), 6.8), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(scenarios), sharex=True, sharey="row", squeeze=False)
    for column, (scenario, rules) in enumerate(scenarios.items()):
        upper, lower = panels[0][column], panels[1][column]
        for name in STYLES:
            if name in rules:
                draw_rule(upper, lower, name, rules[name]["curves"])
        upper.set_title(scenario)
        lower.set_xlabel("step")
        for axes in (upper, lower):
            scale_log(axes)
            axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("surrogate S(x)")
    panels[1][0].set_ylabel("distance to the solution (rms)")
    panels[0][0].text(0.4, 0.9, "every rule", transform=panels[0][0].transAxes)
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=4)
    return figure


def draw_rule(upper: Axes, lower: Axes, name: str, curves: dict[str, list[float]]) -> None:
    color, line, marker = STYLES[name]
    # Markers of neighboring rules stand at different points of their curves.
    points = len(curves["step"])
    first = list(STYLES).index(name) * max(1, points // 50)
    style = {
        "color": color,
        "linestyle": line,
        "marker": marker,
        "markersize": 5,
        "markevery": (first, max(1, points // 7)),
        "linewidth": 1.3,
        "label": LABELS.get(name, name),
    }
    upper.plot(curves["step"], curves["surrogate"], **style)
    lower.plot(curves["step"], curves["error"], **style)


def scale_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started_s = time.process_time()
    measured = measure(args.steps, args.lr)
    conditions = read_conditions(args.steps, args.lr)
    conditions["processor_seconds"] = round(time.process_time() - started_s)
    file = args.results / "theory.json"
    file.write_text(json.dumps({"conditions": conditions, **measured}) + "\n")
    result = json.loads(file.read_text())
    file.with_suffix(".md").write_text(write_markdown(result))
    draw(result).savefig(file.with_suffix(".png"))
    print(write_markdown(result))


if __name__ == "__main__":
    main()

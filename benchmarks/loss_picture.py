"""Draw loss over hours: losses of a small network's runs, with the seconds of GPT-2's steps.

python benchmarks/loss_picture.py      # results/loss_over_hours.png, from two kinds of records

No run was timed whole. The losses are those of a GPT of 0.12 million parameters that read novels
(results/runs): validation loss, mean of five seeds. Each step takes as long as a step of GPT-2 with
124 million parameters on four hosts (gpu/hosts_first_look.json). At 100 Mbit/s, which was not
measured, a step takes the seconds without communication and those of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
SIZE = (4.8, 6.4)
"""Inches. A phone shows the picture so wide that these letters are read there."""
PARAMETERS, HOSTS, STEPS, WIDTH = 124e6, 4, 4000, 64
RATES = {"100mbit": ("100 Mbit/s", 1e8), "1gbit": ("1 Gbit/s", 1e9), "10gbit": ("10 Gbit/s", 1e10)}


class Curve(NamedTuple):
    """A method: the name of its runs and of its seconds, its bits both ways, label and color."""

    runs: str
    seconds: str
    bits: float
    label: str
    color: str


CURVES = (
    Curve("global-adamw-betas-90-99-decay-4", "ddp-fp32", 64, "AdamW, DDP fp32", "#b8bcc4"),
    Curve("global-adamw-betas-90-99-decay-4", "ddp-fp16", 32, "AdamW, DDP fp16", "#6d7683"),
    Curve("majority-cautious-betas-90-95", "majority", 2, "votes, the recipe", "#d9541e"),
    Curve("majority-orthogonal-betas-90-95", "majority", 2, "votes, orthogonalized", "#3b6ea8"),
)


def read_losses(folder: Path, method: str) -> dict[int, float]:
    """Return the mean validation loss of five seeds by step.

    Raises:
        ValueError: A run is missing.
    """
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"text_{method}_*.json"))]
    found = [
        run["validation"]
        for run in runs
        if run["config"]["method"] == method
        and run["config"]["steps"] == STEPS
        and run["config"]["network"]["width"] == WIDTH
        and run["config"]["workers"] in (0, HOSTS)
        and run["config"]["seed"] > 0
    ]
    if len(found) != 5:
        raise ValueError(f"{len(found)} runs of {method} with {STEPS} steps in {folder}, not 5")
    return {rows[0][0]: fmean(row[1] for row in rows) for rows in zip(*found, strict=True)}


def step_seconds(record: Mapping[str, Any], rate: str, curve: Curve) -> float:
    """Return the measured seconds of a step, or those computed from its bytes."""
    if rate in record["seconds"]:
        measured: float = record["seconds"][rate][curve.seconds]
        return measured
    bits = curve.bits * (HOSTS - 1) / HOSTS * PARAMETERS
    computing: float = record["seconds"]["1gbit"]["none"]
    return computing + bits / RATES[rate][1]


def draw(record: Mapping[str, Any], runs: Path) -> Figure:
    """Draw a panel for each rate of the links, the loss of each method over hours."""
    figure = Figure(figsize=SIZE, dpi=140, layout="constrained")
    all_axes = figure.subplots(len(RATES), 1, sharey=True)
    for axes, (rate, (title, _)) in zip(all_axes, RATES.items(), strict=True):
        for curve in CURVES:
            losses = read_losses(runs, curve.runs)
            seconds = step_seconds(record, rate, curve)
            hours = [step * seconds / 3600 for step in losses]
            axes.plot(hours, list(losses.values()), color=curve.color, label=curve.label)
        how = "" if rate in record["seconds"] else " (seconds computed from bytes)"
        axes.set_title(f"{title} links{how}", loc="left", fontsize="medium", fontweight="bold")
        axes.set_xscale("log")
        ticks = [0.1, 0.3, 1, 3, 10, 30]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(0.04, 80)
        axes.grid(color="#dddddd", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[-1].set_xlabel("hours")
    figure.supylabel("validation loss, nats a byte", fontsize="medium")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(
        "Loss of a small GPT (0.12 M), 4,000 steps, 5 seeds.\nHours as if each step took as long "
        "as\nGPT-2's (124 M) on four hosts.",
        x=0.01,
        ha="left",
        fontsize="medium",
    )
    return figure


def main() -> None:
    record = json.loads((RESULTS / "gpu" / "hosts_first_look.json").read_text())
    figure = draw(record, RESULTS / "runs")
    figure.savefig(RESULTS / "loss_over_hours.png", format="png")


if __name__ == "__main__":
    main()

"""Draw the figure of the README: the time of a step with votes and with DDP, at three link rates.

python benchmarks/end_to_end/overview.py draws it again from benchmarks/results/end_to_end.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
METHODS = {
    "ddp-fp32": ("DDP, fp32", "#b8bcc4"),
    "ddp-fp16": ("DDP, fp16 hook", "#8d96a3"),
    "ddp-powersgd": ("DDP, PowerSGD hook", "#5c6675"),
    "majority-auto": ("distlion, majority vote", "#d9541e"),
}
WIDTH = 0.21


def draw_overview(record: dict[str, Any], figure_path: Path) -> None:
    """Draw medians as bars, each with its number, and the time without communication as lines.

    Args:
        record: The part "training" of the results of this benchmark.
        figure_path: Where the PNG goes; an existing file is replaced.
    """
    figure = Figure(figsize=(7.6, 3.3), dpi=200, layout="constrained")
    axes = figure.subplots()
    results = record["results"]
    for place, rate in enumerate(RATES):
        draw_rate(axes, place, {name: each["seconds"] for name, each in results[rate].items()})
    axes.set_xticks(range(len(RATES)), [f"{label} links" for label in RATES.values()])
    axes.set_ylabel("seconds per step (median)")
    axes.set_ylim(0, 5.3)
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    hosts, millions = record["settings"]["hosts"], record["n_parameters"] / 1e6
    axes.set_title(
        f"Training a GPT of {millions:.1f} million parameters on {hosts} hosts",
        loc="left",
        fontsize="medium",
    )
    figure.savefig(figure_path, format="png")


def draw_rate(axes: Axes, place: int, seconds: dict[str, dict[str, float]]) -> None:
    """Draw the bars of one rate."""
    for number, (name, (label, color)) in enumerate(METHODS.items()):
        median = seconds[name]["median"]
        where = place + (number - 1.5) * WIDTH
        axes.bar(where, median, WIDTH * 0.94, color=color, label=None if place else label)
        axes.annotate(
            f"{median:.2f}", (where, median), (0, 3), textcoords="offset points", ha="center"
        )
    ends = (place - 2 * WIDTH, place + 2 * WIDTH)
    floor = seconds["none"]["median"]
    label = None if place else "no communication"
    axes.plot(ends, (floor, floor), color="black", linewidth=1, linestyle=":", label=label)


if __name__ == "__main__":
    held = json.loads((RESULTS / "end_to_end.json").read_text())
    draw_overview(held["training"], RESULTS / "step_time.png")

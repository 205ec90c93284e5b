"""Draw the figure of the README: the time of a step with votes and with DDP, at two link rates.

It has the numbers of the README's table: both are of the emulated accelerator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SWEEP = "8.39 million parameters, 4 hosts"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
METHODS = {
    "ddp-fp32": ("DDP, fp32", "#b8bcc4"),
    "ddp-fp16": ("DDP, fp16 hook", "#8d96a3"),
    "ddp-powersgd": ("DDP, PowerSGD hook", "#5c6675"),
    "majority-auto": ("distlion", "#d9541e"),
    "majority-auto-overlap": ("distlion, overlap=True", "#f0a27f"),
}
WIDTH = 0.17


def draw_overview(record: dict[str, Any], figure_path: Path) -> None:
    """Draw medians as bars, each with its number, and the time without communication as lines.

    Args:
        record: A sweep on an emulated accelerator.
        figure_path: Where the PNG goes; an existing file is replaced.
    """
    figure = Figure(figsize=(4.8, 4.4), dpi=160, layout="constrained")
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
    step_s = record["settings"]["workload"]["step_s"]
    axes.set_title(
        f"A step of {millions:.1f} million parameters on\n{hosts} emulated hosts, "
        f"{step_s:g} s of it computing",
        loc="left",
        fontsize="medium",
    )
    figure.savefig(figure_path, format="png")


def draw_rate(axes: Axes, place: int, seconds: dict[str, dict[str, float]]) -> None:
    """Draw the bars of one rate."""
    middle = (len(METHODS) - 1) / 2
    for number, (name, (label, color)) in enumerate(METHODS.items()):
        median = seconds[name]["median"]
        where = place + (number - middle) * WIDTH
        axes.bar(where, median, WIDTH * 0.94, color=color, label=None if place else label)
        axes.annotate(
            f"{median:.2f}",
            (where, median),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    reach = len(METHODS) / 2 * WIDTH
    floor = seconds["none"]["median"]
    label = None if place else "no communication"
    ends = (place - reach, place + reach)
    axes.plot(ends, (floor, floor), color="black", linewidth=1, linestyle=":", label=label)

"""Draw the README's picture: seconds of a step of GPT-2 on four hosts, votes beside DDP.

python benchmarks/front_picture.py      # results/front.png, from gpu/hosts_first_look.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
RECORD = RESULTS / "gpu" / "hosts_first_look.json"
SIZE = (4.8, 4.2)
"""Inches. A phone shows the picture so wide that these letters are read there."""
RATES = {"10gbit": "10 Gbit/s links", "1gbit": "1 Gbit/s links"}
METHODS = {
    "ddp-fp32": ("DDP, fp32", "#b8bcc4"),
    "ddp-fp16": ("DDP, sent in fp16", "#8d96a3"),
    "majority-overlap": ("distlion, overlap", "#f0a27f"),
    "majority": ("distlion", "#d9541e"),
    "none": ("no communication", "#3f4650"),
}


def draw(record: dict[str, Any]) -> Figure:
    """Draw a bar for each method at each rate, with its seconds and its share of full speed."""
    figure = Figure(figsize=SIZE, dpi=140, layout="constrained")
    all_axes = figure.subplots(len(RATES), 1, sharex=True)
    for axes, (rate, title) in zip(all_axes, RATES.items(), strict=True):
        seconds = record["seconds"][rate]
        for row, (method, (_, color)) in enumerate(METHODS.items()):
            axes.barh(row, seconds[method], color=color, height=0.72)
            share = seconds["none"] / seconds[method]
            text = f" {seconds[method]:.2f} s" + ("" if method == "none" else f"  ({share:.0%})")
            axes.text(seconds[method], row, text, va="center")
        axes.set_xlim(
            0, 1.5 * max(map(max, (each.values() for each in record["seconds"].values())))
        )
        axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        axes.set_yticks(range(len(METHODS)), [label for label, _ in METHODS.values()])
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.suptitle(
        "Seconds of a training step, GPT-2 (124 M).\n4 emulated hosts that share one H100; DDP on "
        "Gloo.\nIn brackets: share of the speed without communication.",
        x=0.01,
        ha="left",
        fontsize="medium",
    )
    return figure


def main() -> None:
    draw(json.loads(RECORD.read_text())).savefig(RESULTS / "front.png", format="png")


if __name__ == "__main__":
    main()

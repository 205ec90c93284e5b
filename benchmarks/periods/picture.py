"""Draw test loss over seconds on two links, and over bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import target_path  # noqa: F401
from drawing import add_words, draw_panel
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from settings import Target

_STYLES = {
    "votes every 8 steps": ("#d9541e", "-"),
    "votes every 32 steps": ("#d9541e", ":"),
    "means every 8 steps": ("#3a78b5", "-"),
    "means every 32 steps": ("#3a78b5", ":"),
    "majority vote in each step": ("#e8a33d", ":"),
    "majority vote in each step, betas (0.9, 0.95)": ("#e8a33d", "-"),
    "DDP, fp32 + AdamW": ("#30343b", "-"),
}
Lines = Mapping[str, Sequence[Sequence[float]]]
"""Points of each method by its title."""


def draw_curves(
    seconds: Mapping[str, Lines], megabytes: Lines, targets: Sequence[Target], path: Path
) -> None:
    """Draw a panel for each link, and one for bytes.

    Args:
        seconds: For each link, seconds and test loss.
        megabytes: Megabytes up and down, and test loss.
        targets: Dashed.
        path: Where the PNG goes; an existing file is replaced.
    """
    figure = Figure(figsize=(10.5, 4.4), dpi=180, layout="constrained")
    panels = figure.subplots(1, len(seconds) + 1, sharey=True)
    drawn = [(f"{link} links", "seconds of training on 8 hosts", e) for link, e in seconds.items()]
    drawn.append(("bytes", "megabytes up and down, each worker", megabytes))
    handles = {}
    for axes, (title, label, lines) in zip(panels, drawn, strict=True):
        draw_panel(axes, lines, targets, styles=_STYLES)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_xlabel(label)
        handles.update({line.get_label(): line for line in axes.get_lines()})
    for axes in (panels[0], panels[-1]):  # three decades have no room for more labels
        axes.xaxis.set_major_locator(LogLocator())
    panels[0].set_ylabel("test loss, nats a byte")
    add_words(
        figure,
        "Test loss over time and bytes with 8 workers: measured step time x trained curve, mean of "
        "3 seeds. Dashes: targets. The hosts share 2 cores.",
        {title: handles[title] for title in _STYLES if title in handles},
        columns=3,
    )
    figure.savefig(path, format="png")

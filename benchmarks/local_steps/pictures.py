"""The picture of the protocol: test loss over seconds on each link, and over bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import target_path  # noqa: F401
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_DPI = 160
_COLUMNS = 2
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points of each method by its title."""
_COLORS = {
    "DDP": "#8d96a3",
    "1-bit Adam": "#3f9163",
    "DiLoCo": "#5b8bd0",
    "a vote": "#f0a27f",
    "votes": "#d9541e",
}
"""By the first words of a title, as in the other pictures."""


def draw_panels(panels: Mapping[str, Lines], targets: Sequence[float], unit: str) -> bytes | None:
    """Draw a panel for each title, all with one legend; None where there is nothing to draw.

    Args:
        panels: Lines by the title of the panel, over a logarithmic axis.
        targets: Losses, dashed.
        unit: Of the losses.
    """
    shown = {title: lines for title, lines in panels.items() if lines}
    if not shown:
        return None
    # Two in a row, so that letters are read on a phone too.
    rows = math.ceil(len(shown) / _COLUMNS)
    figure = Figure(figsize=(4.8, 2.4 * rows + 1.7), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharey=True).flatten()
    for each in axes[len(shown) :]:
        each.remove()
    for each, (title, lines) in zip(axes, shown.items(), strict=False):
        _draw_panel(each, title, lines, targets)
    figure.supylabel(f"test loss, {unit}", fontsize="medium")
    handles = {line.get_label(): line for each in figure.axes for line in each.get_lines()}
    named = {title: line for title, line in handles.items() if not str(title).startswith("_")}
    figure.legend(named.values(), named.keys(), loc="outside lower center")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_panel(axes: Axes, title: str, lines: Lines, targets: Sequence[float]) -> None:
    for name, points in lines.items():
        places, losses = zip(*points, strict=True)
        color = next((each for words, each in _COLORS.items() if name.startswith(words)), "0.3")
        axes.plot(places, losses, color=color, label=name, linewidth=1.8)
    label = "DDP's loss after 50, 80 and 100 % of its steps"
    for target in targets:
        axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(visible=True, alpha=0.3)

"""Draw test results over seconds on each link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from settings import LINKS, LONGER, LONGER_TITLE, METHODS, SETTINGS, Target

_STYLES = {
    **{method.title: (method.color, "-") for method in METHODS.values()},
    LONGER_TITLE: (METHODS[LONGER].color, ":"),
}
_LABELS = {"images": "test accuracy", "text": "test loss, nats a byte"}
_LINKS = {"100mbit": "100 Mbit/s links", "1gbit": "1 Gbit/s links"}

Lines = Mapping[tuple[str, str], Mapping[str, Sequence[tuple[float, float]]]]


def draw_curves(lines: Lines, targets: Mapping[str, Sequence[Target]], path: Path) -> None:
    """Draw a panel for each task and link.

    Args:
        lines: For each task and link, seconds and outcome of each method by its title.
        targets: Of each task.
        path: Where the PNG goes; an existing file is replaced.
    """
    figure = Figure(figsize=(8.6, 6.4), dpi=180, layout="constrained")
    panels = figure.subplots(len(SETTINGS), len(LINKS), sharey="row")
    handles = {}
    for task, row in zip(SETTINGS, panels, strict=True):
        for link, axes in zip(LINKS, row, strict=True):
            draw_panel(axes, lines[task, link], targets[task], styles=_STYLES)
            axes.set_title(f"{task}, {_LINKS[link]}", loc="left", fontsize="medium")
            handles.update({line.get_label(): line for line in axes.get_lines()})
        row[0].set_ylabel(_LABELS[task])
        if task == "images":
            row[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    for axes in panels[-1]:
        axes.set_xlabel("seconds of training on 4 hosts")
    add_words(
        figure,
        "Test results over time on 4 hosts: measured step time x trained curve, mean of 3 seeds.\n"
        "Dashes: targets. The hosts share 2 cores.",
        {title: handles[title] for title in _STYLES if title in handles},
        columns=2,
    )
    figure.savefig(path, format="png")


def add_words(figure: Figure, title: str, handles: Mapping[str, Artist], *, columns: int) -> None:
    """Put a title above all panels, and one legend below them."""
    figure.suptitle(title, fontsize="small", x=0.01, ha="left")
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)


def draw_panel(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    targets: Sequence[Target],
    *,
    styles: Mapping[str, tuple[str, str]],
) -> None:
    """Draw outcomes over a logarithmic axis.

    Args:
        axes: Of the panel.
        lines: Points of each method by its title.
        targets: Dashed.
        styles: Color and dashes of each title.
    """
    for title, points in lines.items():
        color, style = styles[title]
        seconds, outcomes = zip(*points, strict=True)
        axes.plot(seconds, outcomes, style, color=color, label=title, linewidth=1.6)
    for target in targets:
        axes.axhline(target.value, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

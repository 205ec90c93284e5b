"""The figures of a comparison: curves over steps, bytes and seconds, and final outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from distlion.wire import LinkModel
from distlion_lab.report.comparison import LOSS, Cell, Comparison, Metric, Spread

_DPI = 130
_PANEL_INCHES = (4.6, 3.7)
_LEGEND_INCHES = 2.1
# Dark and light colors alternate, so that neighbors in a list differ in gray too.
_COLORS = (
    "#000000",
    "#d55e00",
    "#0072b2",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#882255",
    "#999933",
    "#332288",
    "#117733",
    "#7f7f7f",
    "#aa4499",
)
_MARKERS = "osD^v*PX<>ph8d"
_LINES = {"ours": "-", "full precision": "--", "baseline": ":"}
_BAND_ALPHA = 0.13
_MEGA = 1e6
# Neighboring methods have markers at different points of their curves.
_MARK_EVERY = 3
# Numbers of workers double along the axis; the methods share this part of a doubling.
_DODGE = 0.3

Across = Callable[[Cell, list[int]], list[float]]


def draw_course(comparison: Comparison) -> Figure:
    """Draw accuracy or loss against steps, with a panel for each number of workers."""
    return _draw_curves(
        comparison,
        comparison.course,
        lambda _, steps: [float(step) for step in steps],
        xlabel="step",
        is_log=False,
    )


def draw_bytes(comparison: Comparison) -> Figure:
    """Draw the loss against the bytes that a worker has sent."""

    def sent(cell: Cell, steps: list[int]) -> list[float]:
        return [n_bytes / _MEGA for n_bytes in cell.sent_bytes()]

    return _draw_curves(comparison, LOSS, sent, xlabel="sent by each worker (MB)", is_log=True)


def draw_seconds(comparison: Comparison, link: LinkModel, *, rate: str) -> Figure:
    """Draw the loss against the seconds that training would take on a link.

    Args:
        comparison: The comparison.
        link: Link of each worker.
        rate: Name of the link's rate.
    """

    def seconds(cell: Cell, steps: list[int]) -> list[float]:
        return cell.seconds(link, compute_s=comparison.compute_s)

    return _draw_curves(
        comparison,
        LOSS,
        seconds,
        xlabel=f"predicted time at {rate}/s (s)",
        is_log=True,
    )


def draw_workers(comparison: Comparison) -> Figure:
    """Draw the final error or loss against the number of workers."""
    figure, (axes,) = _make_panels(1)
    for number, method in enumerate(comparison.methods):
        found = [
            (workers, spread)
            for workers in comparison.workers
            if (spread := comparison.cell(method, workers).final(comparison.outcome))
        ]
        shift = _DODGE * ((number + 0.5) / len(comparison.methods) - 0.5)
        places = [workers * 2**shift for workers, _ in found]
        _draw_spreads(axes, places, [spread for _, spread in found], _style(comparison, method))
    axes.set_xscale("log", base=2)
    axes.set_xticks(comparison.workers, [str(workers) for workers in comparison.workers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("workers")
    axes.set_ylabel(f"final {comparison.outcome.name}")
    _finish(figure, [axes])
    return figure


def draw_bits(comparison: Comparison) -> Figure:
    """Draw the final error or loss against bits per parameter and step; lower left is better."""
    figure, panels = _make_panels(len(comparison.workers))
    for axes, workers in zip(panels, comparison.workers, strict=True):
        for method in comparison.methods:
            cell = comparison.cell(method, workers)
            final = cell.final(comparison.outcome)
            style = _style(comparison, method) | {"linestyle": "none", "markersize": 9}
            _draw_spreads(
                axes, [cell.bits_per_parameter] if final else [], [final] if final else [], style
            )
        axes.set_title(_count(workers))
        _scale_log(axes)
        axes.set_xlabel("bits per parameter and step, up + down")
    _label_rows(panels, f"final {comparison.outcome.name}")
    panels[0].text(
        0.03, 0.03, "\u2199 better", transform=panels[0].transAxes, style="italic", color="0.45"
    )
    _finish(figure, panels)
    return figure


def _draw_curves(
    comparison: Comparison, metric: Metric, across: Across, *, xlabel: str, is_log: bool
) -> Figure:
    """Draw means over seeds as lines, and the range of the seeds as bands."""
    figure, panels = _make_panels(len(comparison.workers))
    for axes, workers in zip(panels, comparison.workers, strict=True):
        for method in comparison.methods:
            cell = comparison.cell(method, workers)
            steps, spreads = cell.curve(metric)
            places = across(cell, steps) if steps else []
            style = _style(comparison, method)
            if len(steps) > 2 * _MARK_EVERY:
                first_mark = comparison.methods.index(method) % _MARK_EVERY
                style["markevery"] = (first_mark, _MARK_EVERY)
            # Before the first step, bytes and seconds are 0.
            first = 1 if is_log and steps else 0
            _draw_curve(axes, places[first:], spreads[first:], style)
        axes.set_title(_count(workers))
        axes.set_xlabel(xlabel)
        if is_log:
            _scale_log(axes)
    _label_rows(panels, metric.name)
    _finish(figure, panels)
    return figure


def _draw_curve(
    axes: Axes, places: Sequence[float], spreads: Sequence[Spread], style: dict[str, Any]
) -> None:
    axes.plot(places, [spread.mean for spread in spreads], **style)
    axes.fill_between(
        places,
        [spread.least for spread in spreads],
        [spread.most for spread in spreads],
        color=style["color"],
        alpha=_BAND_ALPHA,
        linewidth=0,
    )


def _draw_spreads(
    axes: Axes, places: Sequence[float], spreads: Sequence[Spread], style: dict[str, Any]
) -> None:
    """Draw means with standard deviations; a diverged method keeps its legend."""
    axes.errorbar(
        places,
        [spread.mean for spread in spreads],
        [spread.sd for spread in spreads],
        capsize=3,
        elinewidth=1,
        **style,
    )


def _style(comparison: Comparison, method: str) -> dict[str, Any]:
    """Distinguish methods by color and marker, and their kinds by the line.

    Markers of baselines are hollow, so that points under them are visible.
    """
    number = comparison.methods.index(method)
    kind = comparison.index["methods"][method]["kind"]
    return {
        "color": _COLORS[number % len(_COLORS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _LINES.get(kind, "-"),
        "fillstyle": "none" if kind == "baseline" else "full",
        "markersize": 5,
        "linewidth": 1.4,
        "label": method,
    }


def _make_panels(count: int) -> tuple[Figure, list[Axes]]:
    # Two panels side by side are readable at the width of a page.
    columns = min(count, 2 if count <= 4 else 3)
    rows = math.ceil(count / columns)
    width = max(columns, 1.4 if count == 1 else 1) * _PANEL_INCHES[0] + _LEGEND_INCHES
    figure = Figure(figsize=(width, rows * _PANEL_INCHES[1]), dpi=_DPI, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _label_rows(panels: Sequence[Axes], text: str) -> None:
    for axes in panels:
        place = axes.get_subplotspec()
        if place is not None and place.is_first_col():
            axes.set_ylabel(text)


def _scale_log(axes: Axes) -> None:
    if axes.dataLim.x1 <= 0:  # a single worker sends nothing
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
        # Shared axes would hide the labels where another panel is below.
        axes.tick_params(labelbottom=True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small", handlelength=3)


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"

"""Step time and speed-up of methods against the rate of the links, drawn from a sweep's record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from distlion_lab.errors import DataError
from distlion_netlab.sweep_table import check_sweep, find_baseline

_INCHES = (11.0, 5.5)
_DPI = 150
_LINES = ("-", "--", ":", "-.")
_MARKERS = "os^vD*Px<>"
_FLOOR = "none"


def draw_sweep_figure(
    record: dict[str, Any], figure_path: Path, *, methods: Sequence[str] | None = None
) -> None:
    """Draw a sweep as a PNG that also reads in grayscale: medians, with quartiles as bars.

    Args:
        record: Record from ``distlion_netlab.run_sweep``, or the same read from JSON.
        figure_path: Path of the PNG; an existing file is replaced.
        methods: Methods to draw; None for all.

    Raises:
        DataError: The record is none of a sweep, or the figure cannot be written.
    """
    check_sweep(record)
    wanted = record["settings"]["methods"] if methods is None else methods
    shown = [name for name in wanted if name not in record["missing"]]
    baseline = find_baseline(record)
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(_describe(record))
    for number, name in enumerate(shown):
        style = _style(number)
        _draw(left, record, name, lambda result: result["seconds"], style)
        if baseline is not None:
            _draw(right, record, name, lambda result: result["speed_up"][baseline], style)
    left.set_ylabel("time of a step (s)")
    right.set_ylabel(f"speed-up over {baseline} (times)")
    for axes in (left, right):
        _finish(axes, list(record["results"]))
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    try:
        figure.savefig(figure_path, format="png")
    except OSError as error:
        raise DataError(f"figure {str(figure_path)!r} cannot be written: {error}") from error


_KINDS = {
    "gpt": "training a GPT",
    "device": "an emulated training",
    "vector": "exchanging a vector",
}


def _describe(record: dict[str, Any]) -> str:
    settings = record["settings"]
    kind = _KINDS[settings["workload"]["kind"]]
    size = record["n_parameters"] / 1e6
    return f"{kind} of {size:.3g} million parameters, {settings['hosts']} hosts"


def _style(number: int) -> dict[str, Any]:
    return {
        "color": f"C{number}",
        "linestyle": _LINES[number % len(_LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 5,
        "capsize": 2,
    }


def _draw(axes: Axes, record: dict[str, Any], name: str, pick: Any, style: dict[str, Any]) -> None:
    rates = list(record["results"])
    found = [
        (place, pick(record["results"][rate][name]))
        for place, rate in enumerate(rates)
        if name in record["results"][rate]
    ]
    middle = [summary["median"] for _, summary in found]
    below = [summary["median"] - summary["q1"] for _, summary in found]
    above = [summary["q3"] - summary["median"] for _, summary in found]
    label = "no communication" if name == _FLOOR else name
    axes.errorbar([place for place, _ in found], middle, [below, above], label=label, **style)


def _finish(axes: Axes, rates: list[str]) -> None:
    axes.set_xticks(range(len(rates)), rates)
    axes.set_xlabel("rate of each host's link")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, alpha=0.3)

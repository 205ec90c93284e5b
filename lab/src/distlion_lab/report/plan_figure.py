"""A figure of a plan: efficiency against the link's rate and against the number of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.errors import DataError

_INCHES = (10.0, 4.5)
_DPI = 150
_LINES = ("-", "--", ":", "-.")
_GIGA = 1e9


def draw_plan_figure(record: dict[str, Any], figure_path: Path | IO[bytes]) -> None:
    """Draw the sweeps of a plan as a PNG that also reads in grayscale.

    Args:
        record: Record from ``distlion_lab.planning.build_record``, or the same read from JSON.
        figure_path: Path of the PNG, of which an existing file is replaced, or an open file.

    Raises:
        DataError: The record is none of a plan, or the figure cannot be written.
    """
    if not {"sweep", "scenario"} <= record.keys():
        raise DataError("record lacks sweep or scenario; expected the record of a plan")
    sweep, scenario = record["sweep"], record["scenario"]
    rate_gbit = scenario["link"]["rate_bit_per_s"] / _GIGA
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(
        f"{scenario['n_params']:.3g} parameters, {scenario['gpus_per_node']} workers a node, "
        f"{scenario['compute_s']:.3g} s of compute a step"
    )
    rates_gbit = [rate / _GIGA for rate in sweep["rates"]["x"]]
    _draw_efficiencies(left, rates_gbit, sweep["rates"]["efficiency"], marked=rate_gbit)
    left.set_xlabel(f"payload rate between {scenario['nodes']:,} nodes (Gbit/s)")
    left.set_ylabel("scaling efficiency (compute / step)")
    left.legend()
    nodes = sweep["nodes"]
    _draw_efficiencies(right, nodes["x"], nodes["efficiency"], marked=scenario["nodes"])
    right.set_xlabel(f"nodes at {rate_gbit:.3g} Gbit/s of payload")
    try:
        figure.savefig(figure_path, format="png")
    except OSError as error:
        raise DataError(f"figure {str(figure_path)!r} cannot be written: {error}") from error


def _draw_efficiencies(
    axes: Axes, x: list[float], efficiencies: dict[str, list[float]], *, marked: float
) -> None:
    for number, (name, values) in enumerate(efficiencies.items()):
        axes.plot(x, values, _LINES[number % len(_LINES)], color=f"C{number}", label=name)
    axes.axvline(marked, color="0.7", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.3)

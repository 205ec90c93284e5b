"""Validation losses of runs of one task: over steps, and over the bytes that each worker sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distlion_lab.names import name_rule

_INCHES = (9.0, 4.0)
_DPI = 150
_STYLES = (("tab:blue", "-", "o"), ("black", "--", "s"))


def draw_beside_figure(records: Sequence[Mapping[str, Any]], figure_path: Path) -> None:
    """Draw the validation losses of two runs as a PNG that also reads in grayscale.

    Args:
        records: Content of ``record.json`` of each run; both have the same task and steps.
        figure_path: Path of the PNG; an existing file is replaced.
    """
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for record, (color, line, marker) in zip(records, _STYLES, strict=True):
        steps, losses = record["evaluations"]["step"], record["evaluations"]["loss"]
        look = {"color": color, "linestyle": line, "marker": marker}
        label = name_rule(record["settings"])
        by_step.plot(steps, losses, label=label, **look)
        sent = [step * _count_step_megabytes(record) for step in steps[1:]]
        if record["sent_bytes_per_worker"]:  # a logarithmic axis has no 0
            by_bytes.plot(sent, losses[1:], label=label, **look)
    by_step.set_xlabel("step")
    by_step.set_ylabel("validation loss (nats per prediction)")
    by_bytes.set_xlabel("MB sent by each worker")
    by_bytes.set_xscale("log")
    for axes in (by_step, by_bytes):
        axes.grid(visible=True, alpha=0.3)
    by_step.legend()
    figure.savefig(figure_path, format="png")


def _count_step_megabytes(record: Mapping[str, Any]) -> float:
    return float(record["sent_bytes_per_worker"] / record["settings"]["steps"] / 1e6)

"""The loss curves of a run, alone or beside another one, drawn from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.names import name_rule

# Weight of the past in the smoothed training loss: about 10 steps.
_SMOOTHING = 0.9
_INCHES = (7.0, 4.5)
_BESIDE_INCHES = (9.0, 4.0)
_DPI = 150
_STYLES = (("tab:blue", "-", "o"), ("black", "--", "s"))


def draw_loss_figure(record: Mapping[str, Any], figure_path: Path) -> None:
    """Draw training and validation loss over steps as a PNG that also reads in grayscale.

    Args:
        record: Content of the ``record.json`` of a run.
        figure_path: Path of the PNG; an existing file is replaced.
    """
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    _draw_losses(axes, record)
    settings = record["settings"]
    axes.set_title(
        f"{settings['task']}, {name_rule(settings)}, {record['world_size']} workers, "
        f"{record['bits_per_parameter']:.3g} bits per parameter and step",
        parse_math=False,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per prediction)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(figure_path, format="png")


def _draw_losses(axes: Axes, record: Mapping[str, Any]) -> None:
    losses, evaluations = record["losses"], record["evaluations"]
    done = [step + 1 for step in losses["step"]]
    axes.plot(done, losses["loss"], color="0.8", linewidth=0.8, label="training, each step")
    axes.plot(done, smooth(losses["loss"]), color="tab:blue", label="training, smoothed")
    axes.plot(
        evaluations["step"],
        evaluations["loss"],
        color="black",
        linestyle="--",
        marker="o",
        label="validation",
    )


def smooth(values: list[float]) -> list[float]:
    """Average each value with an exponentially fading past, unbiased from the start."""
    smoothed: list[float] = []
    total = weight = 0.0
    for value in values:
        total = _SMOOTHING * total + value
        weight = _SMOOTHING * weight + 1
        smoothed.append(total / weight)
    return smoothed


def draw_beside_figure(records: Sequence[Mapping[str, Any]], figure_path: Path) -> None:
    """Draw the validation losses of two runs as a PNG that also reads in grayscale.

    Args:
        records: Content of ``record.json`` of each run; both have the same task and steps.
        figure_path: Path of the PNG; an existing file is replaced.
    """
    figure = Figure(figsize=_BESIDE_INCHES, dpi=_DPI, layout="constrained")
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

"""The loss curves of a run, drawn from its record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.names import name_rule

# Weight of the past in the smoothed training loss: about 10 steps.
_SMOOTHING = 0.9
_INCHES = (7.0, 4.5)
_DPI = 150


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

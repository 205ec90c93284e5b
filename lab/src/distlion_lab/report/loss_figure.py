"""The loss curves of a run, alone or beside another one, drawn from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.names import name_rule, name_runs
from distlion_lab.report.race import Lap, find_target

# Weight of the past in the smoothed training loss: about 10 steps.
_SMOOTHING = 0.9
_INCHES = (7.0, 4.5)
_PANEL_INCHES = (4.5, 4.0)
_BYTES = "MB sent by each worker"
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


def draw_beside_figure(
    records: Sequence[Mapping[str, Any]], figure_path: Path, laps: Sequence[Lap] = ()
) -> None:
    """Draw the validation losses of two runs as a PNG that also reads in grayscale.

    They are drawn over steps, and over the seconds of each lap; without laps over bytes.

    Args:
        records: Content of ``record.json`` of each run; both have the same task and steps.
        figure_path: Path of the PNG; an existing file is replaced.
        laps: Seconds of the runs over links of several rates.
    """
    panels = [("step", [record["evaluations"]["step"] for record in records])]
    if laps:
        panels += [(f"seconds, links of {lap.rate}", list(lap.seconds)) for lap in laps]
    else:
        panels.append((_BYTES, [_list_megabytes(record) for record in records]))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), dpi=_DPI, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (what, places) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, records, places)
        axes.set_xlabel(what)
        axes.grid(visible=True, alpha=0.3)
        if what == _BYTES:
            axes.set_xscale("log")
        elif laps and what != "step":
            axes.axhline(find_target(records), color="0.5", linewidth=0.8, linestyle=":")
    all_axes[0].set_ylabel("validation loss (nats per prediction)")
    all_axes[0].legend()
    figure.savefig(figure_path, format="png")


def _draw_panel(
    axes: Axes, records: Sequence[Mapping[str, Any]], places: Sequence[Sequence[float]]
) -> None:
    labels = name_runs([record["settings"] for record in records])
    for record, at, label, style in zip(records, places, labels, _STYLES, strict=True):
        color, line, marker = style
        # A logarithmic axis has no 0: bytes begin after the first steps.
        losses = record["evaluations"]["loss"][-len(at) :] if at else []
        axes.plot(at, losses, label=label, color=color, linestyle=line, marker=marker)


def _list_megabytes(record: Mapping[str, Any]) -> list[float]:
    """Return the megabytes sent until each validation but the first; none if none are sent."""
    step_megabytes = record["sent_bytes_per_worker"] / record["settings"]["steps"] / 1e6
    steps = record["evaluations"]["step"][1:] if step_megabytes else []
    return [step * step_megabytes for step in steps]

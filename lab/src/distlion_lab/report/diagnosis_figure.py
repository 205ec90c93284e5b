"""Agreement of workers over steps and parameters, drawn from an optimizer's diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.errors import DataError

_MEASURES = {
    "margin": "vote margin |sum| / N",
    "ties": "share of ties",
    "agreement": "agreement with global Lion",
    "coherence": "momenta: $\\|$mean$\\|^2$ / mean $\\|\\cdot\\|^2$",
}
_WIDTH_INCHES = 11.0
_LEAST_INCHES, _INCHES_PER_NAME = 3.0, 0.17
_MOST_NAMES = 60
_DPI = 120
# Lightness rises with the value, so that the map survives grayscale.
_COLORS = "cividis"


def draw_diagnosis_figure(
    diagnostics: Sequence[dict[str, Any]], figure_path: Path, *, title: str
) -> None:
    """Draw each measure as a map: parameters from top to bottom, steps from left to right.

    Args:
        diagnostics: Each ``Diagnosis`` as a dictionary, as in a record.
        figure_path: Path of the PNG; an existing file is replaced.
        title: Title above all maps.

    Raises:
        DataError: There is nothing to draw, or a measure is missing.
    """
    if not diagnostics:
        raise DataError("there are no diagnostics to draw; train with diagnose_every=")
    steps = sorted({entry["step"] for entry in diagnostics})
    names = list(dict.fromkeys(entry["parameter"] for entry in diagnostics))
    height = max(_LEAST_INCHES, 1.2 + _INCHES_PER_NAME * min(len(names), _MOST_NAMES))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    panels = figure.subplots(1, len(_MEASURES), sharey=True)
    for axes, (measure, label) in zip(panels, _MEASURES.items(), strict=True):
        image = _draw_map(axes, _arrange(diagnostics, measure, steps, names), steps)
        axes.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9)
    shown = range(0, len(names), -(-len(names) // _MOST_NAMES))
    panels[0].set_yticks(list(shown), [names[index] for index in shown], fontsize=6)
    figure.suptitle(title, fontsize=10)
    figure.savefig(figure_path, format="png")


def _arrange(
    diagnostics: Sequence[dict[str, Any]], measure: str, steps: Sequence[int], names: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Return (names, steps), with NaN where a parameter had no vote."""
    rows = {name: row for row, name in enumerate(names)}
    columns = {step: column for column, step in enumerate(steps)}
    values = np.full((len(names), len(steps)), np.nan)
    for entry in diagnostics:
        if measure not in entry:
            raise DataError(f"a diagnosis lacks {measure!r}: {sorted(entry)}")
        values[rows[entry["parameter"]], columns[entry["step"]]] = entry[measure]
    return values


def _draw_map(axes: Axes, values: npt.NDArray[np.float64], steps: Sequence[int]) -> Any:
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=_COLORS)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int))
    axes.set_xticks(shown, [str(steps[index]) for index in shown], fontsize=7)
    axes.set_xlabel("step", fontsize=8)
    return image

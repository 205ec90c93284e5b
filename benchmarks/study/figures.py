"""The figures of the study."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from claims import Study
from evidence import UNITS, Ending
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan import PARTS

_DPI = 110
_MARKERS = "osD^vP*X<>h"


def draw_endings(study: Study) -> bytes | None:
    """Draw the outcome of every seed, a panel for each part; None where there is none yet."""
    shown = [
        (part, [each for each in study.endings[part.name] if each.outcomes()]) for part in PARTS
    ]
    shown = [(part, endings) for part, endings in shown if endings]
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.3 * columns, 3.2 * rows), dpi=_DPI, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (part, endings) in zip(panels, shown, strict=False):
        for place, ending in enumerate(endings):
            outcomes = ending.outcomes()
            axes.plot(outcomes, [place] * len(outcomes), "|", color="0.2", markersize=10)
            axes.plot(np.mean(outcomes), place, "o", color="tab:blue", markersize=5)
        axes.set_yticks(range(len(endings)), [describe(each) for each in endings], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(part.title, fontsize=9)
        axes.set_xlabel(UNITS[endings[0].cell.setting.task], fontsize=8)
        axes.grid(visible=True, axis="x", alpha=0.3)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    return _to_png(figure)


def describe(ending: Ending) -> str:
    """Return a method's name, with what its cell has beside it."""
    cell = ending.cell
    more = [] if cell.alpha is None else [f"alpha {cell.alpha:g}"]
    more += [f"{cell.attackers} x {cell.factor:g}"] if cell.attackers else []
    return " ".join([cell.method, *(f"({each})" for each in more)])


def draw_bits(study: Study, names: Sequence[str] = ("images-4", "images-8")) -> bytes | None:
    """Draw outcomes against bits per parameter and step, both ways together."""
    endings = {name: [e for e in study.endings[name] if e.outcomes()] for name in names}
    shown = {name: found for name, found in endings.items() if found}
    if not shown:
        return None
    figure = Figure(figsize=(5.5 * len(shown), 4.0), dpi=_DPI, layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False).flat
    for axes, (name, found) in zip(panels, shown.items(), strict=True):
        for number, ending in enumerate(found):
            first = next(iter(ending.records.values()))
            axes.plot(
                first["bits_up"] + first["bits_down"],
                np.mean(ending.outcomes()),
                _MARKERS[number % len(_MARKERS)],
                label=describe(ending),
            )
        axes.set_xscale("log")
        axes.set_title(next(part.title for part in PARTS if part.name == name), fontsize=9)
        axes.set_xlabel("bits per parameter and step, up and down")
        axes.set_ylabel(UNITS[found[0].cell.setting.task])
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    return _to_png(figure)


def draw_curves(study: Study, names: Sequence[str] = ("images-4", "text-4")) -> bytes | None:
    """Draw validation loss over steps, the mean of the seeds that are there."""
    shown = {
        name: [each for each in study.endings[name] if each.outcomes()]
        for name in names
        if any(each.outcomes() for each in study.endings[name])
    }
    if not shown:
        return None
    figure = Figure(figsize=(5.5 * len(shown), 4.0), dpi=_DPI, layout="constrained")
    for axes, (name, endings) in zip(
        figure.subplots(1, len(shown), squeeze=False).flat, shown.items(), strict=True
    ):
        for number, ending in enumerate(endings):
            _draw_curve(axes, ending, _MARKERS[number % len(_MARKERS)])
        axes.set_title(next(part.title for part in PARTS if part.name == name), fontsize=9)
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss (nats)")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    return _to_png(figure)


def _draw_curve(axes: Axes, ending: Ending, marker: str) -> None:
    whole = [each["validation"] for each in ending.records.values() if not each["diverged"]]
    steps = [row[0] for row in whole[0]]
    means = np.mean([[row[1] for row in rows] for rows in whole], axis=0)
    axes.plot(steps, means, marker=marker, markersize=4, linewidth=1, label=describe(ending))


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version of matplotlib: equal records, equal files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()

"""The picture of the protocol: distance to AdamW over steps, size and workers."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from answers import Claim
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import MARGINS, SETTINGS

_DPI = 110
_UNITS = {"text": "nats a byte", "images": "points of test error"}


def draw_distances(claims: Sequence[Claim]) -> bytes | None:
    """Draw each method's distance to AdamW with its interval; None where there is none yet."""
    shown = [
        each
        for each in claims
        if each.is_even
        and each.difference.reference.cell.method.startswith("global-adamw")
        and math.isfinite(each.difference.high)
    ]
    tasks = [task for task in MARGINS if any(each.cell.setting.task == task for each in shown)]
    if not tasks:
        return None
    figure = Figure(figsize=(6.5 * len(tasks), 4.5), dpi=_DPI, layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        _draw_task(axes, task, [each for each in shown if each.cell.setting.task == task])
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_task(axes: Axes, task: str, claims: Sequence[Claim]) -> None:
    columns = sorted({_place(each) for each in claims})
    methods = list(dict.fromkeys(each.cell.method for each in claims))
    for number, method in enumerate(methods):
        own = [each for each in claims if each.cell.method == method]
        shift = 0.7 * ((number + 0.5) / len(methods) - 0.5)
        axes.errorbar(
            [columns.index(_place(each)) + shift for each in own],
            [each.difference.mean for each in own],
            [each.difference.mean - each.difference.low for each in own],
            fmt="o",
            markersize=4,
            label=method,
        )
    axes.axhspan(-MARGINS[task], MARGINS[task], color="0.85", label="margin")
    axes.set_xticks(range(len(columns)), [label for *_, label in columns], fontsize=8)
    axes.set_ylabel(f"distance to AdamW, {_UNITS[task]}")
    axes.legend(fontsize=7)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _place(claim: Claim) -> tuple[int, int, str]:
    """Return where a claim stands from left to right, and what is written below."""
    workers = claim.cell.workers or 4
    label = claim.setting + ("" if workers == 4 else f"\nN = {workers}")
    return list(SETTINGS).index(claim.setting), workers, label

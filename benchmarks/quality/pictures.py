"""The picture of the protocol: distance to AdamW over steps, size and workers."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from answers import Claim
from differences import Difference
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import CAUTIOUS, MARGINS, MASKED, PAPER, SETTINGS, SHORT

Place = tuple[int, int, str]
"""Number of the setting, number of workers, and the label below the axis."""
_DPI = 160
_TITLES = {"text": "GPT on novels", "images": "convolutions on CIFAR-10"}
_UNITS = {"text": "nats a byte", "images": "points of test error"}
_LINEAR_BELOW, _LONG_SCALE = 0.02, 0.3
"""In nats: where a distance is longer than the second, the scale is logarithmic above the first."""
SHOWN: Mapping[str, str] = {
    PAPER: "one bit, betas (0.9, 0.99)",
    SHORT: "one bit, betas (0.9, 0.95)",
    CAUTIOUS: "one bit, betas (0.9, 0.95), cautious (the recipe)",
    MASKED: "MaskedVote(), betas (0.9, 0.95)",
    "library-feedback-2-betas-90-95": "FeedbackVote(bits=2), betas (0.9, 0.95)",
    "global-lion-betas-90-95": "Lion on the mean gradient, betas (0.9, 0.95)",
}
"""Methods; where one ran only with a tuned decay, that run is shown."""


def draw_distances(claims: Sequence[Claim], shown_as: Mapping[str, str] = SHOWN) -> bytes | None:
    """Draw each method's distance to AdamW with its interval; None where there is none yet.

    Args:
        claims: All comparisons.
        shown_as: Methods that are shown, and what they are called.
    """
    shown = [
        each
        for each in claims
        if each.is_even
        and _without_decay(each) in shown_as
        and each.difference.reference.cell.method.startswith("global-adamw")
        and math.isfinite(each.difference.high)
    ]
    tasks = [task for task in MARGINS if any(each.cell.setting.task == task for each in shown)]
    if not tasks:
        return None
    # One below the other, so that letters are read on a phone too.
    figure = Figure(figsize=(4.8, 4 * len(tasks) + 1.8), dpi=_DPI, layout="constrained")
    for axes, task in zip(figure.subplots(len(tasks), 1, squeeze=False).flat, tasks, strict=True):
        own = [each for each in shown if each.cell.setting.task == task]
        _draw_task(axes, task, own, shown_as)
    named = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def list_lines(
    claims: Sequence[Claim], shown_as: Mapping[str, str] = SHOWN
) -> dict[str, dict[Place, Difference]]:
    """Return the differences of each method that is shown, by place."""
    lines = {}
    for method, label in shown_as.items():
        alike = [each for each in claims if _without_decay(each) == method]
        tuned = [each for each in alike if each.cell.method != method]
        plain = [each for each in alike if each.cell.method == method]
        lines[label] = {_place(each): each.difference for each in (*tuned, *plain)}
    return lines


def _draw_task(axes: Axes, task: str, claims: Sequence[Claim], shown_as: Mapping[str, str]) -> None:
    columns = sorted({_place(each) for each in claims})
    margin = ", ".join(f"{MARGINS[each]:g} {_UNITS[each]}" for each in MARGINS)
    axes.axhspan(
        -MARGINS[task], MARGINS[task], color="0.85", label=f"a match: all within\n{margin}"
    )
    axes.axhline(0, color="0.4", linewidth=0.8)
    lines = {label: line for label, line in list_lines(claims, shown_as).items() if line}
    names = list(shown_as.values())
    for number, (label, line) in enumerate(lines.items()):
        shift = 0.7 * ((number + 0.5) / len(lines) - 0.5)
        axes.errorbar(
            [columns.index(place) + shift for place in line],
            [difference.mean for difference in line.values()],
            [difference.mean - difference.low for difference in line.values()],
            fmt="o",
            markersize=4,
            color=f"C{names.index(label)}",
            label=label,
        )
    for place in range(1, len(columns)):
        axes.axvline(place - 0.5, color="0.9", linewidth=1)
    longest = max(abs(each.difference.mean) for each in claims)
    is_long = task == "text" and longest > _LONG_SCALE
    if is_long:
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axes.set_yticks([-0.02, -0.01, 0, 0.01, 0.02, 0.1, 1], minor=False)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(columns)), [label for *_, label in columns], fontsize=9)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    scale = f"\n(above {_LINEAR_BELOW} logarithmic)" if is_long else ""
    axes.set_ylabel(
        f"loss minus AdamW's, {_UNITS[task]}{scale}"
        if task == "text"
        else f"error minus AdamW's, {_UNITS[task]}"
    )
    for place, words in ((0.98, "worse than AdamW"), (0.02, "better than AdamW")):
        axes.text(0.995, place, words, transform=axes.transAxes, ha="right", va="center")
    axes.set_xlabel("parameters, steps and workers")
    axes.set_title(f"{_TITLES[task]}, lower is better")
    axes.grid(visible=True, axis="y", alpha=0.3)


def _without_decay(claim: Claim) -> str:
    return claim.cell.method.partition("-decay-")[0]


def _place(claim: Claim) -> Place:
    workers = claim.cell.workers or 4
    first, *_ = claim.difference.method.records.values()
    label = f"{first['parameters'] / 1e6:.2f} M\n{claim.cell.setting.steps:,}\n{workers}"
    return list(SETTINGS).index(claim.setting), workers, label

"""What all runs together show: a table, a figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from attackers import ATTACKS, AVERAGING, CLASSES, METHODS, Outcome, Run
from matplotlib.figure import Figure

# Color, line and marker; neighbors differ in gray too.
STYLES: dict[str, tuple[str, Any, str]] = {
    "MajorityVote()": ("#d55e00", "-", "o"),
    "TernaryVote()": ("#e69f00", "--", "s"),
    "Average()": ("#0072b2", "-", "^"),
    "QuantizedVote(bits=2)": ("#009e73", "-.", "D"),
    "FullPrecision()": ("#999999", "-", "v"),
    AVERAGING: ("#000000", ":", "x"),
}


def summarize(outcomes: Sequence[tuple[Run, Outcome]]) -> dict[str, dict[str, Any]]:
    """Return mean, deviation and range of accuracies, by attack, method and Byzantine workers."""
    cells: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run, outcome in outcomes:
        for attack in ATTACKS if run.byzantine == 0 else (run.attack,):
            cells[attack, run.method, run.byzantine].append(outcome.accuracy)
    table: dict[str, dict[str, Any]] = {}
    for (attack, method, byzantine), found in sorted(cells.items(), key=lambda cell: cell[0][2]):
        table.setdefault(attack, {}).setdefault(method, {})[str(byzantine)] = {
            "mean": mean(found),
            "sd": stdev(found) if len(found) > 1 else 0.0,
            "least": min(found),
            "most": max(found),
        }
    return table


def write_markdown(result: dict[str, Any]) -> str:
    conditions = result["conditions"]
    lines = [
        "# Byzantine workers",
        "",
        "Made by `python benchmarks/byzantine` from `byzantine.json`.",
        "",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in conditions.items()),
        "",
        "![Held-out accuracy against the number of Byzantine workers](byzantine.png)",
        "",
        "Final accuracy on held-out images in per cent, mean ± standard deviation over seeds;",
        f"{100 / CLASSES:g} is chance. A column for each number of Byzantine workers, of "
        f"{conditions['workers']}.",
    ]
    for attack in ATTACKS:
        rows = result["summary"][attack]
        counts = list(next(iter(rows.values())))
        lines += ["", f"## {attack}", "", f"| method | {' | '.join(counts)} |"]
        lines.append("|---" * (len(counts) + 1) + "|")
        for method in METHODS:
            cells = [rows[method][count] for count in counts]
            shown = [f"{100 * cell['mean']:.1f} ± {100 * cell['sd']:.1f}" for cell in cells]
            lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def draw(result: dict[str, Any]) -> Figure:
    """Draw mean and range of accuracies against Byzantine workers, a panel for each attack."""
    figure = Figure(figsize=(12.5, 4.7), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(ATTACKS), sharey=True)
    for axes, (attack, rows) in zip(panels, result["summary"].items(), strict=True):
        for number, (method, (color, line, marker)) in enumerate(STYLES.items()):
            counts = [int(count) for count in rows[method]]
            cells = list(rows[method].values())
            middle = [100 * cell["mean"] for cell in cells]
            below = [100 * (cell["mean"] - cell["least"]) for cell in cells]
            above = [100 * (cell["most"] - cell["mean"]) for cell in cells]
            # Side by side, so that bars do not cover each other.
            places = [count + 0.06 * (number - (len(STYLES) - 1) / 2) for count in counts]
            axes.errorbar(
                places,
                middle,
                (below, above),
                color=color,
                linestyle=line,
                marker=marker,
                markersize=6,
                linewidth=1.4,
                elinewidth=1,
                capsize=2,
                label=method,
            )
        axes.axhline(100 / CLASSES, color="0.5", linewidth=1, linestyle=(0, (1, 3)))
        axes.set_title(attack)
        axes.set_xticks(counts)
        axes.set_xlabel(f"Byzantine workers of {result['conditions']['workers']}")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylim(0, 100)
    panels[0].set_ylabel("held-out accuracy (%)")
    panels[0].text(-0.2, 100 / CLASSES + 1, "chance", color="0.4", fontsize="small")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, handlelength=3.5)
    return figure

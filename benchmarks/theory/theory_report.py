"""Table and figure of what was measured."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Of all steps: what counts as the end.
LAST = 0.1
# Columns of the table, and their digits.
SHOWN = {"mean_surrogate": 2, "final_surrogate": 3, "final_error": 4}
# Color, line and marker; those that stand beside each other differ in gray too. TernaryVote moves
# as MajorityVote(tie='zero') does, where no direction is ever exactly 0.
STYLES: dict[str, tuple[str, Any, str]] = {
    "FullPrecision()": ("#000000", "-", ""),
    "MajorityVote()": ("#d55e00", "-", "o"),
    "MajorityVote(tie='zero')": ("#e69f00", "--", "s"),
    "Average()": ("#0072b2", "-", "^"),
    "QuantizedVote(bits=2)": ("#56b4e9", ":", "v"),
    "QuantizedVote(bits=4)": ("#009e73", "-.", "D"),
    "QuantizedVote(bits=4, norm='linf')": ("#cc79a7", (0, (6, 2)), "x"),
}
LABELS = {"MajorityVote(tie='zero')": "MajorityVote(tie='zero'), TernaryVote()"}


def write_markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Lion solves a problem inside a box",
        "",
        "Made by `python benchmarks/theory` from `theory.json`.",
        "",
        *(f"- {name.replace('_', ' ')}: {v}" for name, v in result["conditions"].items()),
        "",
        "![S(x) and the distance to the solution over steps](theory.png)",
        "",
        "S(x) = sum |g| + w x g, g the exact gradient. End: mean of the last "
        f"{LAST:.0%} of the steps. Error: root mean square distance to the known solution. "
        "Mean ± standard deviation of the seeds.",
        "",
        "| workers | rule | S, mean of all steps | S, end | error, end |",
        "|---|---|---|---|---|",
    ]
    for scenario, rules in result["scenarios"].items():
        for name, row in rules.items():
            shown = "every rule" if len(rules) == 1 else f"`{name}`"
            cells = [
                f"{row[column]:.{digits}f} ± {row[f'{column}_deviation']:.{digits}f}"
                for column, digits in SHOWN.items()
            ]
            lines.append(f"| {' | '.join([scenario, shown, *cells])} |")
    rows = [row for rules in result["scenarios"].values() for row in rules.values()]
    outside = result["from_outside"].values()
    factor = 1 - result["conditions"]["lr"] * result["conditions"]["weight_decay"]
    lines += [
        "",
        f"Least S of all steps: {min(row['least_surrogate'] for row in rows):.3f}. Farthest "
        f"outside the box: {max(row['most_outside'] for row in rows):.2g}.",
        "",
        "From far outside, the distance of the farthest element to the box: in no step and",
        f"under no rule multiplied by more than {max(row['largest'] for row in outside):.7f} "
        f"(1 - lr * weight_decay = {factor:g}, before rounding).",
        "",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """Draw S above and the error below, a column for each scenario."""
    scenarios = result["scenarios"]
    figure = Figure(figsize=(3.3 * len(scenarios), 6.8), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(scenarios), sharex=True, sharey="row", squeeze=False)
    for column, (scenario, rules) in enumerate(scenarios.items()):
        upper, lower = panels[0][column], panels[1][column]
        for name in STYLES:
            if name in rules:
                draw_rule(upper, lower, name, rules[name]["curves"])
        upper.set_title(scenario)
        lower.set_xlabel("step")
        for axes in (upper, lower):
            scale_log(axes)
            axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("surrogate S(x)")
    panels[1][0].set_ylabel("distance to the solution (rms)")
    panels[0][0].text(0.4, 0.9, "every rule", transform=panels[0][0].transAxes)
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=4)
    return figure


def draw_rule(upper: Axes, lower: Axes, name: str, curves: dict[str, list[float]]) -> None:
    color, line, marker = STYLES[name]
    # Markers of neighboring rules stand at different points of their curves.
    points = len(curves["step"])
    first = list(STYLES).index(name) * max(1, points // 50)
    style = {
        "color": color,
        "linestyle": line,
        "marker": marker,
        "markersize": 5,
        "markevery": (first, max(1, points // 7)),
        "linewidth": 1.3,
        "label": LABELS.get(name, name),
    }
    upper.plot(curves["step"], curves["surrogate"], **style)
    lower.plot(curves["step"], curves["error"], **style)


def scale_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())

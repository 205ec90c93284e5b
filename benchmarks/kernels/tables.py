"""Tables of a measurement, made from its JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

VERDICTS = {True: "yes", False: "NO", None: ""}


def read_rows(
    result: dict[str, Any], *, quartiles: bool
) -> tuple[list[str], list[tuple[str, list[list[str]]]]]:
    """Return the headings, and for each group its title and its lines."""
    head = ["", "target"]
    for threads in result["runs"]:
        head += [f"{threads} thread{'s' * (threads != '1')}", "met"]
    first, *_ = result["runs"].values()
    groups = []
    for number, group in enumerate(first["groups"]):
        lines = []
        for position, row in enumerate(group["rows"]):
            line = [row["name"], format_target(row)]
            for run in result["runs"].values():
                measured = run["groups"][number]["rows"][position]
                line += [format_measured(measured, quartiles), VERDICTS[measured["met"]]]
            lines.append(line)
        groups.append((group["title"], lines))
    return head, groups


def format_target(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return f"{'>=' if row['at_least'] else '<='} {row['target']:.2f}"


def format_measured(row: dict[str, Any], quartiles: bool) -> str:
    if row["median"] is None:
        return "not measured"
    if not quartiles:
        return round_off(row["median"])
    return f"{round_off(row['median'])} ({round_off(row['q1'])} - {round_off(row['q3'])})"


def round_off(value: float) -> str:
    """Give three digits to what is below 10, and whole numbers no more."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def build_tables(result: dict[str, Any]) -> list[Table]:
    head, groups = read_rows(result, quartiles=False)
    tables = []
    for title, lines in groups:
        table = Table(title=title, title_justify="left")
        for column in head:
            table.add_column(column, justify="left" if column in ("", "met") else "right")
        for line in lines:
            table.add_row(*line, style="red" if "NO" in line else None)
        tables.append(table)
    return tables


def write_markdown(result: dict[str, Any]) -> str:
    lines = ["# Kernels", "", "Made by `python benchmarks/kernels` from `kernels.json`.", ""]
    lines += [f"- {name}: {value}" for name, value in describe_conditions(result)]
    lines += [
        "",
        "Medians over the repetitions (and quartiles). A number without unit is a ratio of",
    ]
    lines += ["times within one repetition: what is before the slash, divided by what is after it."]
    head, groups = read_rows(result, quartiles=True)
    for title, rows in groups:
        lines += ["", f"## {title}", "", *format_rows(head, rows)]
    return "\n".join([*lines, "", "## Seconds", "", *list_seconds(result)]) + "\n"


def describe_conditions(result: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [(name.replace("_", " "), str(v)) for name, v in result["conditions"].items()]
    missing = {
        f"not measured, {threads} threads": f"{name} ({reason})"
        for threads, run in result["runs"].items()
        for name, reason in run["missing"].items()
    }
    return [*pairs, *missing.items()]


def format_rows(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---" if column in ("", "met") else "---:" for column in head]
    return [f"| {' | '.join(row)} |" for row in [head, rule, *rows]]


def list_seconds(result: dict[str, Any]) -> list[str]:
    head = ["", *(f"{threads} thread{'s' * (threads != '1')}" for threads in result["runs"])]
    first, *_ = result["runs"].values()
    rows = []
    for number, group in enumerate(first["groups"]):
        rows.append([f"**{group['title']}**"] + [""] * len(result["runs"]))
        for name in group["seconds"]:
            cells = [run["groups"][number]["seconds"].get(name) for run in result["runs"].values()]
            rows.append([name, *(f"{c['median']:.6f}" if c else "" for c in cells)])
    return format_rows(head, rows)

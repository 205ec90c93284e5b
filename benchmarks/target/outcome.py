"""Seconds to each target, out of the records: tables, and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import study_path  # noqa: F401
from archive import Records
from cells import SEEDS, Choice, choose_rate
from crossing import Curve, cross, find_column
from drawing import draw_curves
from settings import (
    FLOOR,
    LINKS,
    LONGER_TITLE,
    METHODS,
    SETTINGS,
    TIMED,
    Target,
    TargetCell,
    list_cells,
    set_targets,
)

LINK_TITLES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
REFERENCE = "global-adamw"


@dataclass(frozen=True)
class Row:
    """A method on a task.

    Attributes:
        cell: The method.
        title: For reports.
        choice: Its rate.
        curves: Of test data, by seed.
        diverged: The seeds whose run has: they reach nothing, whatever they scored before.
    """

    cell: TargetCell
    title: str
    choice: Choice
    curves: dict[int, Curve]
    diverged: frozenset[int]

    @property
    def has_diverged(self) -> bool:
        """Whether one of its runs has diverged."""
        return bool(self.diverged)

    @property
    def is_complete(self) -> bool:
        """Whether all of its seeds are there."""
        return len(self.curves) == len(SEEDS)

    def crossings(self, target: Target) -> list[float] | None:
        """Return the steps at which its seeds reach a target; None unless all of them do."""
        steps = self.list_crossings(target)
        return steps if self.is_complete and len(steps) == len(self.curves) else None

    def list_crossings(self, target: Target) -> list[float]:
        """Return the steps at which those seeds that reach a target do so."""
        task = self.cell.setting.task
        found = (
            cross(curve, task, target.value)
            for seed, curve in self.curves.items()
            if seed not in self.diverged
        )
        return [step for step in found if step is not None]

    def ends(self) -> list[float]:
        """Return the outcome of each seed after the last step."""
        column = find_column(self.cell.setting.task)
        return [curve[-1][column] for curve in self.curves.values()]


def read_rows(task: str, records: Records) -> list[Row]:
    """Return the methods of a task, with what has been recorded of them."""
    rows = []
    for cell in list_cells(task):
        is_longer = cell.setting.steps > SETTINGS[task].steps
        title = LONGER_TITLE if is_longer else METHODS[cell.method].title
        rows.append(read_row(cell, title, records))
    return rows


def read_row(cell: TargetCell, title: str, records: Records) -> Row:
    """Return a method with what has been recorded of it."""
    choice = choose_rate(cell, records.read)
    curves: dict[int, Curve] = {}
    diverged = set()
    for seed in SEEDS if choice.rate is not None else ():
        assert choice.rate is not None
        record = records.read(cell.config(choice.rate, seed, is_tuning=False).name)
        if record is not None:
            if record["diverged"] is not None:
                diverged.add(seed)
            curves[seed] = record["test_curve"]
    return Row(cell, title, choice, curves, frozenset(diverged))


def read_step_seconds(folder: Path, task: str, link: str) -> dict[str, list[float]]:
    """Return for each method the seconds of a step in each of its blocks; none if not measured."""
    path = folder / f"steps_{task}_{link}.json"
    if not path.exists():
        return {}
    seconds: dict[str, list[float]] = json.loads(path.read_text())["seconds"]
    timed = {name: method.timed_as or name for name, method in METHODS.items()}
    return seconds | {name: seconds[like] for name, like in timed.items() if like in seconds}


Table = tuple[str, list[str], list[list[str]]]


def tabulate_targets(task: str, folder: Path, rows: list[Row], targets: list[Target]) -> Table:
    """Tabulate seconds to each target on each link, and how many times DDP fp32 takes as long."""
    columns = [(target, link) for target in targets for link in LINKS]
    references = {
        (target.name, link): _seconds(row, target, folder, link)
        for row in rows
        if row.cell.method == REFERENCE
        for target, link in columns
    }
    lines = []
    for row in rows:
        line = [row.title, describe_rate(row), describe_ends(row)]
        for target, link in columns:
            seconds = _seconds(row, target, folder, link)
            if row.is_complete and row.crossings(target) is None:
                reached = len(row.list_crossings(target))
                line.append(f"not reached ({reached} of {len(SEEDS)} seeds)")
            else:
                line.append(describe_seconds(seconds, references[target.name, link]))
        lines.append(line)
    outcome = "accuracy" if task == "images" else "loss"
    head = ["method", "rate", f"test {outcome} at the end"]
    head += [f"{describe_target(task, target)}, {LINK_TITLES[link]}" for target, link in columns]
    return f"{task.capitalize()}: seconds to a target", head, lines


def _seconds(row: Row, target: Target, folder: Path, link: str) -> list[float] | None:
    steps = row.crossings(target)
    blocks = read_step_seconds(folder, row.cell.setting.task, link).get(row.cell.method)
    return None if steps is None or blocks is None else [step * median(blocks) for step in steps]


def describe_target(task: str, target: Target) -> str:
    """Say what is to be reached."""
    value = f"{target.value:.0%}" if task == "images" else f"{target.value:.2f} nats"
    return f"{target.name}: {value}"


def describe_rate(row: Row) -> str:
    """Say which rate was chosen."""
    if row.choice.rate is None:
        return "-"
    return f"{row.choice.rate:g}" + (" (edge)" if row.choice.at_edge else "")


def describe_ends(row: Row) -> str:
    """Say how the seeds ended."""
    if not row.curves:
        return "missing"
    if row.has_diverged:
        return "diverged"
    if row.cell.setting.task == "images":
        text = f"{fmean(row.ends()):.1%} ({min(row.ends()):.1%} - {max(row.ends()):.1%})"
    else:
        text = f"{fmean(row.ends()):.3f} ({min(row.ends()):.3f} - {max(row.ends()):.3f})"
    return text if row.is_complete else f"{text}, {len(row.curves)} of {len(SEEDS)} seeds"


def describe_seconds(seconds: list[float] | None, reference: list[float] | None) -> str:
    """Say seconds, and how many times as long a reference takes."""
    if seconds is None:
        return "missing"
    text = f"{fmean(seconds):.1f} ({min(seconds):.1f} - {max(seconds):.1f})"
    if reference is None:
        return text
    return f"{text}, {fmean(reference) / fmean(seconds):.2f}x"


def tabulate_steps(task: str, folder: Path) -> Table:
    """Tabulate milliseconds of a step with quartiles."""
    lines = []
    for method in (*TIMED, FLOOR):
        line = ["AdamW without communication" if method == FLOOR else METHODS[method].title]
        for link in LINKS:
            blocks = read_step_seconds(folder, task, link).get(method)
            if blocks is None:
                line.append("missing")
                continue
            low, middle, high = (
                1e3 * value for value in quantiles(blocks, n=4, method="inclusive")
            )
            line.append(f"{middle:.0f} ({low:.0f} - {high:.0f}), {len(blocks)} blocks")
        lines.append(line)
    head = ["method", *(f"{LINK_TITLES[link]}, ms" for link in LINKS)]
    return f"{task.capitalize()}: a step in the lab, median and quartiles of blocks", head, lines


def tabulate_whole(folder: Path, records: Records) -> Table:
    """Tabulate whole runs in the lab beside what is computed for them."""
    lines = []
    for path in sorted(folder.glob("whole_*.json")):
        found = json.loads(path.read_text())
        config, link = found["config"], found["link"]
        steps, seconds = found["test_curve"][-1][:2]
        blocks = read_step_seconds(folder, found["task"], link).get(config["method"])
        method = config["method"]
        cells = (each for each in list_cells(found["task"]) if each.method == method)
        run = next(cells).config(config["lr"], config["seed"], is_tuning=False)
        virtual = records.read(run.name)
        line = [found["task"], method, LINK_TITLES[link], str(config["seed"]), f"{seconds:.1f}"]
        computed = None if blocks is None else steps * median(blocks)
        line += (
            ["-", "-"]
            if computed is None
            else [f"{computed:.1f}", f"{seconds / computed - 1:+.1%}"]
        )
        lines.append([*line, *_compare(found, virtual)])
    head = ["task", "method", "link", "seed", "seconds", "computed", "measured against computed"]
    return "Whole runs in the lab", [*head, "last test outcome", "virtual", "parameters"], lines


def _compare(found: dict[str, Any], virtual: dict[str, Any] | None) -> list[str]:
    column = find_column(found["task"])
    # A row of a whole run has its seconds in the second place.
    real = f"{found['test_curve'][-1][column + 1]:.4f}"
    if virtual is None:
        return [real, "missing", "-"]
    same = virtual["parameters_sha256"] == found["parameters_sha256"]
    other = f"{virtual['test_curve'][-1][column]:.4f}"
    return [real, other, "bitwise identical" if same else "other bits"]


def list_missing(rows: Sequence[Row]) -> list[str]:
    """Name what has not been run yet."""
    return [
        f"{row.cell.setting.task}, {row.title}: {len(row.curves)} of {len(SEEDS)} seeds"
        for row in rows
        if not row.is_complete
    ]


def write_report(records: Records, results: Path) -> str:
    """Write tables and figure from the records; return the tables."""
    folder = records.folder
    rows = {task: read_rows(task, records) for task in SETTINGS}
    targets = {task: set_targets(task, records.read) for task in SETTINGS}
    tables = [tabulate_targets(task, folder, rows[task], targets[task]) for task in SETTINGS]
    tables += [tabulate_steps(task, folder) for task in SETTINGS]
    tables.append(tabulate_whole(folder, records))
    missing = list_missing([row for each in rows.values() for row in each])
    text = _write_markdown(tables, missing, name_congestion_controls(folder))
    (results / "time_to_target.md").write_text(text)
    draw_curves(collect_lines(folder, rows), targets, results / "time_to_target.png")
    return text


def name_congestion_controls(folder: Path) -> str:
    """Name the TCP congestion controls of the hosts of all records from the lab."""
    paths = [*folder.glob("steps_*.json"), *folder.glob("whole_*.json")]
    found = {json.loads(path.read_text())["conditions"]["tcp_congestion_control"] for path in paths}
    return ", ".join(sorted(found)) or "none was measured"


def collect_lines(
    folder: Path, rows: dict[str, list[Row]]
) -> dict[tuple[str, str], dict[str, list[tuple[float, float]]]]:
    """Return for each task and link the lines to draw: seconds and outcome, mean of the seeds."""
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for task, of_task in rows.items():
        for link in LINKS:
            seconds = read_step_seconds(folder, task, link)
            lines[task, link] = {
                row.title: average_curve(row, median(seconds[row.cell.method]))
                for row in of_task
                if row.is_complete and not row.has_diverged and row.cell.method in seconds
            }
    return lines


def average_curve(row: Row, unit: float) -> list[tuple[float, float]]:
    """Return points of the mean curve, its steps in a unit."""
    column = find_column(row.cell.setting.task)
    points = zip(*row.curves.values(), strict=True)
    return [(each[0][0] * unit, fmean(point[column] for point in each)) for each in points]


def _write_markdown(tables: list[Table], missing: list[str], congestion_controls: str) -> str:
    lines = [
        "# Time to a target",
        "",
        "Made by `python benchmarks/target` from the records in `target/`; the protocol is in",
        "[protocol.md](../../studies/protocol.md#time-to-a-target). Seconds are computed",
        "from the measured step time and the trained curve: mean and range of three seeds, and how",
        "many times as long DDP fp32 takes. Four hosts share two cores, so that computing takes",
        "longer than on four machines and so does the work on packets, most of it DDP's: ratios on",
        "four machines would be others at 1 Gbit/s, in a direction that is not known.",
        "The last table shows how much longer whole runs in the lab took than computed.",
        "",
        f"TCP congestion control of the hosts: {congestion_controls}.",
    ]
    return compose_page(lines, tables, missing)


def compose_page(lines: Sequence[str], tables: Sequence[Table], missing: Sequence[str]) -> str:
    """Return a page of tables as Markdown, below its first lines and what is missing."""
    page = list(lines)
    if missing:
        page += ["", "**Incomplete**:", "", *(f"- {each}" for each in missing)]
    for title, head, rows in tables:
        rule = ["---"] + ["---:"] * (len(head) - 1)
        page += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in [head, rule, *rows])]
    return "\n".join(page) + "\n"

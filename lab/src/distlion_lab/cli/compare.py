"""``distlion compare``: methods with equal tuning, over worker counts and seeds, with a report."""

from __future__ import annotations

import dataclasses
import json
import shlex
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from distlion.wire import LinkModel
from distlion_lab.cli.failure import refusing, shown_failures
from distlion_lab.cli.options import (
    ALPHA,
    BATCH_SIZE,
    DATA,
    MODEL_CONFIG,
    PARTITION,
    SCHEDULE,
    STEPS,
    TASK,
    TOKENIZER,
    choice,
    flag,
    name_new_folder,
    number,
    taking,
    whole,
)
from distlion_lab.cli.progress import LiveDisplay
from distlion_lab.cli.quantity import read_rate, read_seconds
from distlion_lab.cli.table import build_table, print_table
from distlion_lab.planning.checkup import count_cores
from distlion_lab.planning.line import model_line
from distlion_lab.planning.quantity import parse_whole
from distlion_lab.report.comparison import read_comparison
from distlion_lab.report.comparison_report import write_comparison_report
from distlion_lab.report.comparison_tables import tabulate_outcome
from distlion_lab.report.comparison_warnings import list_warnings
from distlion_lab.training.compare import CompareProgress, compare
from distlion_lab.training.compare_settings import DEFAULT_METHODS, CompareSettings
from distlion_lab.training.methods import METHOD_NAMES
from distlion_lab.training.presets import PRESETS, Preset, make_quick
from distlion_lab.training.train_settings import TaskName

EXAMPLE = (
    "Example: distlion compare --task images --methods majority,average,global-lion --workers 4,8 "
    "--seeds 3 --out comparison"
)
_COMPARISONS = Path("comparisons")
# Left out of the command that repeats a comparison; the folder is added to it.
_LEFT_OUT = ("out", "as_json", "jobs")


@taking(
    task=TASK._replace(default=TaskName.IMAGES),
    preset=choice(Preset, "Methods and workers of a paper; other options override.", "none"),
    quick=flag("--quick", "Minutes on two cores: fewer steps, workers and seeds."),
    methods=choice(
        str,
        f"Methods, separated by commas: {', '.join(METHOD_NAMES)}. P is 1 to 8 bits, at most "
        "2 for feedback; cautious masks elements whose direction and gradient differ in sign; A "
        "and B are digits of betas: majority-betas-90-95 has (0.9, 0.95); K is the number of "
        "steps in which momenta are averaged once, or workers exchange once.",
        ",".join(DEFAULT_METHODS),
    ),
    workers=choice(str, "Numbers of virtual workers, separated by commas.", "4,8"),
    seeds=whole("Reported runs of each method.", "3"),
    lrs=whole("Learning rates that each method tries; 1: no tuning.", "3"),
    lr_factor=number("Ratio of neighboring learning rates.", default=3.0),
    lr_scale=number("Factor on all learning rates: smaller for larger models.", "1"),
    steps=STEPS,
    tuning_steps=whole("Steps of runs that choose a learning rate.", "--steps"),
    schedule=SCHEDULE,
    warmup_steps=whole("Steps of linear warm-up.", "a tenth"),
    batch_size=BATCH_SIZE,
    eval_every=whole("Steps between evaluations.", "a tenth"),
    weight_decay=number("Weight decay of all methods.", "by the method"),
    data=DATA,
    partition=PARTITION,
    alpha=ALPHA,
    tokenizer=TOKENIZER,
    model_config=MODEL_CONFIG,
    device=choice(str, "Device to train on: cpu, cuda.", default="cpu"),
    link=choice(str, "Link of each worker for predicted times: 1gbit.", default="1gbit"),
    latency_us=choice(str, "Latency of a round on that link: 100 (in us), 0.1ms.", default="100"),
    out=choice(
        Path,
        "Folder for records and report; its finished runs are not repeated.",
        "a new one in comparisons",
    ),
    jobs=whole("Runs at the same time.", "number of cores; on a GPU 1"),
    as_json=flag("--json", "Print the outcome to standard output."),
)
def compare_command(context: typer.Context, **given: Any) -> None:
    """Train with virtual workers by several methods, all tuned equally, and report a comparison.

    Every run leaves a record in the folder and is not repeated, so a comparison can be
    interrupted, continued and extended. The folder gets report.html, report.md and the figures.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        settings = _choose_settings(given)
        latency_s = read_seconds("--latency-us", given["latency_us"], unit="us")
        link = model_line(read_rate("--link", given["link"]), latency_s=latency_s)
        folder = given["out"] or name_new_folder(_COMPARISONS, settings.task.value)
        _run_all(settings, folder, given["jobs"], _format_command(context, folder), messages)
        _report(folder, link, given["link"], as_json=given["as_json"])


def _choose_settings(given: dict[str, Any]) -> CompareSettings:
    """Combine options: given ones first, then --quick, then the preset; defaults fill the rest."""
    fields = {field.name for field in dataclasses.fields(CompareSettings)} - {"task"}
    settings = {name: value for name, value in given.items() if name in fields}
    settings |= {"methods": _split(given["methods"]), "workers": _split_numbers(given["workers"])}
    task, embedded = given["task"], given["data"] is None
    chosen: dict[str, Any] = {
        **(PRESETS[given["preset"]] if given["preset"] else {}),
        **(make_quick(task, embedded=embedded, steps=given["steps"]) if given["quick"] else {}),
        **{name: value for name, value in settings.items() if value is not None},
    }
    return CompareSettings.with_defaults(task, **chosen)


def _run_all(
    settings: CompareSettings, folder: Path, jobs: int | None, command: str, messages: Console
) -> None:
    """Do the runs that the folder does not hold yet, and show the progress."""
    jobs = _default_jobs(settings.device) if jobs is None else jobs
    with _Display(messages) as display:
        compare(settings, folder=folder, jobs=jobs, command=command, observe=display)


def _split(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _split_numbers(text: str | None) -> tuple[int, ...] | None:
    parts = _split(text)
    if parts is None:
        return None
    with refusing("--workers"):
        return tuple(map(parse_whole, parts))


def _default_jobs(device: str) -> int:
    """Return one job for each core; on a GPU a single one."""
    return count_cores() if device == "cpu" else 1


def _format_command(context: typer.Context, folder: Path) -> str:
    """Format the given command, without options on which its records do not depend."""
    words = ["distlion", "compare"]
    for param in context.command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _LEFT_OUT:
            continue
        value = context.params[name]
        words += [param.opts[0]] if value is True else [param.opts[0], _format_value(value)]
    return shlex.join([*words, "--out", str(folder)])


def _format_value(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


class _Display(LiveDisplay):
    """Show the progress of a comparison."""

    def __init__(self, console: Console) -> None:
        left = TextColumn("{task.fields[runs]}  {task.fields[left]}")
        columns = TextColumn("{task.description}"), BarColumn(), left
        super().__init__(console, *columns, description="starting", total=1.0, runs="", left="")

    def __call__(self, progress: CompareProgress) -> None:
        """Show the comparison's progress."""
        runs = f"{progress.done_runs}/{progress.total_runs} runs"
        left = "" if progress.seconds_left is None else f"{_format_s(progress.seconds_left)} left"
        self.show(
            f"{progress.done_share:4.0%}  {runs}  {left}  {progress.what}",
            completed=progress.done_share,
            description=progress.what,
            runs=runs,
            left=left,
        )


def _format_s(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _report(folder: Path, link: LinkModel, rate: str, *, as_json: bool) -> None:
    """Write the report into the folder, and show its tables."""
    page = write_comparison_report(folder, link=link, rate=rate)[-1]
    comparison = read_comparison(folder)
    tables = {
        workers: tabulate_outcome(comparison, workers, link=link, rate=rate)
        for workers in comparison.workers
    }
    warnings = list_warnings(comparison)
    if as_json:
        outcome: dict[str, Any] = {
            str(workers): [dict(zip(table.head, row, strict=True)) for row in table.rows]
            for workers, table in tables.items()
        }
        shown = {"folder": str(folder), "outcome": outcome, "warnings": warnings}
        typer.echo(json.dumps(shown, indent=1))
        return
    console = Console()
    for workers, table in tables.items():
        title = f"{workers} workers"
        print_table(console, build_table(table.head, table.rows, left=("method",), title=title))
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    console.print(Text(f"report: {page}"), soft_wrap=True)

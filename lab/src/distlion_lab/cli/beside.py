"""A second run beside the first one: the same task, data, seed and steps with another rule."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from distlion.errors import InvalidArgumentError
from distlion_lab.cli.race import RACE_NAME, print_race, print_samples, run_race
from distlion_lab.cli.table import build_table, print_table
from distlion_lab.cli.training_run import Runs
from distlion_lab.errors import DataError
from distlion_lab.names import name_runs
from distlion_lab.report.loss_figure import draw_beside_figure
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.delta_worker import find_delta_rule
from distlion_lab.training.methods import find_rule
from distlion_lab.training.record import Record
from distlion_lab.training.train_settings import (
    OnDisagreement,
    Overlap,
    TrainSettings,
    torchrun_world_size,
)
from distlion_lab.training.workers import AUTO

BESIDE_NAME = "beside"
WIRE_BITS_PER_S = 100e6
_NEXT = (
    (
        "your own network: edit the four numbers",
        "plan --params 125e6 --nodes 4 --link 1gbit --compute-s 0.5",
    ),
    ("both tuned, with several seeds", "compare --quick --task {task} --methods {methods}"),
)


def settle_beside(settings: TrainSettings, rule: str, lr: float | None) -> TrainSettings:
    """Return the settings of the second run: the first run's, but for the rule and its defaults.

    Args:
        settings: Settings of the first run.
        rule: Rule of the second run.
        lr: Highest learning rate of the second run; None for the rule's default.

    Raises:
        InvalidArgumentError: The rule is unknown, or does not train with these settings.
    """
    method = find_rule(rule)
    changes: dict[str, Any] = {
        "rule": rule,
        "every": None,
        "lr": method.train_lr if lr is None else lr,
        "weight_decay": method.train_weight_decay,
    }
    if not method.votes:
        changes |= {"exchange": AUTO, "overlap": Overlap.OFF}
        changes |= {"on_disagreement": OnDisagreement.WARN}
        changes |= dict.fromkeys(("momentum_sync_every", "diagnose_every", "step_timeout_s"))
    return dataclasses.replace(settings, **changes)


def read_beside(settings: TrainSettings, options: Mapping[str, Any]) -> TrainSettings | None:
    """Return the settings of the run beside the first one; None if none is asked for.

    Args:
        settings: Settings of the first run.
        options: Options of ``distlion train``, by name.

    Raises:
        InvalidArgumentError: Options are incompatible, or as in ``settle_beside``.
    """
    if options["beside"] is None:
        if options["beside_lr"] is not None:
            raise InvalidArgumentError("--beside-lr is given without --beside, the rule it is for")
        return None
    for name in ("crew", "resume", "as_json"):
        if options[name]:
            option = name.removeprefix("as_")
            raise InvalidArgumentError(f"--beside is given with --{option}; run the two one by one")
    if torchrun_world_size() is not None:
        raise InvalidArgumentError("--beside starts local workers; leave it out under torchrun")
    _check_folders(options["run_dir"], [BESIDE_NAME, *([RACE_NAME] if options["race"] else [])])
    return settle_beside(settings, options["beside"], options["beside_lr"])


def _check_folders(run_dir: Path | None, names: Sequence[str]) -> None:
    """Refuse folders of an earlier run before anything is trained."""
    for folder in (run_dir / name for name in names) if run_dir is not None else ():
        if os.path.lexists(folder):
            raise InvalidArgumentError(
                f"--run-dir {run_dir} holds {folder} of an earlier run, where this one would write "
                "too; choose another --run-dir, or remove that folder"
            )


def train_beside(
    runs: Runs,
    first: Record,
    settings: tuple[TrainSettings, TrainSettings],
    run_dir: Path,
    rates: Sequence[str] = (),
) -> None:
    """Train by another rule too, let both race if asked to, and show both runs.

    Args:
        runs: Trains with settings, and shows the progress.
        first: Record of the first run.
        settings: Settings of the first run, and of the second, from ``settle_beside``.
        run_dir: Folder of the first run, for ``beside.png`` and the folder ``beside``.
        rates: Rates of links over which they race.

    Raises:
        DataError: The figure cannot be written.
    """
    second = runs.train(settings[1], run_dir / BESIDE_NAME, CheckpointSettings())
    assert second is not None  # not under torchrun
    records = [first.to_json(), second.to_json()]
    laps = run_race(rates, runs, settings, records, run_dir)
    console = Console()
    print_beside(console, first, second, is_timed=not laps)
    print_samples(console, (first, second))
    if laps:
        print_race(console, (first, second), laps)
    figure = run_dir / f"{BESIDE_NAME}.png"
    try:
        draw_beside_figure(records, figure, laps)
    except OSError as error:
        raise DataError(
            f"{str(figure)!r} cannot be written: {error.strerror}. Both runs have their records"
        ) from error
    console.print(Text(f"both curves: {figure}"), soft_wrap=True)
    print_next(console, first, second)


def print_beside(console: Console, first: Record, second: Record, *, is_timed: bool = True) -> None:
    """Show the losses of two runs after equal steps and in equal time, and their bytes.

    Args:
        console: Where.
        first: Record of the first run.
        second: Record of the second run.
        is_timed: False to leave out what concerns time, which a race shows.
    """
    runs, within_s = (first, second), min(_last(run, "seconds") for run in (first, second))
    rules = name_runs([run.settings for run in runs])
    ahead = second.final_validation_loss - first.final_validation_loss
    rows = {
        "learning rate": [f"{run.settings['lr']:g}" for run in runs],
        "validation loss": [f"{run.final_validation_loss:.4f}" for run in runs],
    }
    if is_timed:
        losses = [f"{_find_loss(run, within_s):.4f}" for run in runs]
        rows[f"... after {within_s:.0f} s on this machine"] = losses
    rows["validation accuracy"] = [f"{run.final_validation_accuracy:.1%}" for run in runs]
    sent = [_count_step_bytes(run) for run in runs]
    rows["sent by each worker in a step"] = [f"{n_bytes / 1e6:.2f} MB" for n_bytes in sent]
    if is_timed:
        carried = [f"{8 * n_bytes / WIRE_BITS_PER_S:.3f} s" for n_bytes in sent]
        rows["... which takes, at 100 Mbit/s"] = carried
    table = build_table(
        ("", *rules),
        [(name, *cells) for name, cells in rows.items()],
        left=("",),
        title=f"{first.settings['steps']} steps each, on the same data",
    )
    print_table(console, table)
    share = f"{abs(ahead) / second.final_validation_loss:.1%}"
    verb = f"{'leads' if ahead > 0 else 'trails'} {rules[1]} by {share}"
    console.print(
        Text(
            f"{rules[0]} {verb if ahead else f'matches {rules[1]}'} in validation loss and "
            f"{_compare_bytes(first, second)}. A single run is inconclusive."
        ),
        soft_wrap=True,
    )


def print_next(console: Console, first: Record, second: Record) -> None:
    """Show two commands to run after these runs, as this shell finds them."""
    methods = ",".join(dict.fromkeys(_name_method(run) for run in (first, second)))
    program = "distlion" if shutil.which("distlion") else sys.argv[0]
    console.print("Next:")
    for what, command in _NEXT:
        words = command.format(task=first.settings["task"], methods=methods)
        console.print(Text(f"  {program} {words}   # {what}"), soft_wrap=True)


def _compare_bytes(first: Record, second: Record) -> str:
    """Describe the ratio of the runs' bytes, larger to smaller."""
    mine, other = (_count_step_bytes(run) for run in (first, second))
    if not (mine and other):
        return "sends nothing" if not mine else "sends bytes, while the other one sends none"
    if mine > other:
        return f"sends {mine / other:.1f}x as many bytes"
    return f"sends {other / mine:.1f}x fewer bytes"


def _name_method(run: Record) -> str:
    """Return the name of a run's rule in ``distlion compare``."""
    rule, every = str(run.settings["rule"]), run.settings.get("every")
    return rule if every is None else find_delta_rule(rule, every=int(every)).name


def _last(run: Record, name: str) -> float:
    return run.evaluations[name][-1]


def _find_loss(run: Record, at_s: float) -> float:
    """Return the validation loss at a time, on a straight line between two validations."""
    seconds, losses = run.evaluations["seconds"], run.evaluations["loss"]
    return float(np.interp(at_s, seconds, losses))


def _count_step_bytes(run: Record) -> float:
    return run.sent_bytes_per_worker / int(run.settings["steps"])

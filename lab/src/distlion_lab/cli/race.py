"""A race of two runs to one loss, over emulated links where this machine has them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from distlion.errors import InvalidArgumentError
from distlion_lab.cli.quantity import read_rate
from distlion_lab.cli.table import build_table, print_table
from distlion_lab.cli.training_run import Runs
from distlion_lab.errors import NetlabError
from distlion_lab.names import name_runs
from distlion_lab.planning.quantity import format_rate, parse_rate
from distlion_lab.report.race import (
    Lap,
    compute_seconds,
    count_timed_steps,
    extrapolate_seconds,
    find_arrival,
    find_target,
)
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.network import open_network
from distlion_lab.training.record import Record
from distlion_lab.training.train_settings import TrainSettings

RACE_NAME = "race"


def read_race(options: Mapping[str, Any]) -> list[str]:
    """Return the rates of the links of a race; none if no race is asked for.

    Args:
        options: Options of ``distlion train``, by name.

    Raises:
        InvalidArgumentError: A rate is none, or there is no second run.
    """
    if options["race"] is None:
        return []
    if options["beside"] is None:
        raise InvalidArgumentError("--race is given without --beside, the rule to race with")
    rates = [format_rate(read_rate("--race", rate)) for rate in options["race"].split(",")]
    return list(dict.fromkeys(rates))


def run_race(
    rates: Sequence[str],
    runs: Runs,
    settings: Sequence[TrainSettings],
    records: Sequence[Mapping[str, Any]],
    run_dir: Path,
) -> list[Lap]:
    """Find the seconds of two runs over links of each rate.

    Where this machine emulates links, 25 steps of each run are timed over them, or whole periods
    of a run that does not send the same in every step. Their records go to ``race`` in the run
    folder.

    Args:
        rates: Rates of the links, from ``read_race``.
        runs: Trains with settings.
        settings: Settings of both runs.
        records: Content of their records.
        run_dir: Folder of the first run.
    """
    laps, period = [], math.lcm(*map(_find_period, settings))
    n_steps = count_timed_steps(period)
    try:
        with contextlib.ExitStack() as stack:
            network = None
            for rate in rates:
                if network is None:
                    opened = open_network(settings[0].workers, rate)
                    network = stack.enter_context(opened)
                network.set_rates(rate)
                over = dataclasses.replace(runs, enter=network.enter)
                folder = run_dir / RACE_NAME / rate
                runs.messages.print(f"{n_steps} steps of each over links of {rate}")
                seconds = []
                for number, (each, record) in enumerate(zip(settings, records, strict=True), 1):
                    # Both may have the same rule, with other learning rates.
                    short = _time_steps(over, each, n_steps, folder / f"{number}-{each.rule}")
                    seconds.append(extrapolate_seconds(record, short, period=period))
                laps.append(Lap(rate, f"{n_steps} steps measured", tuple(seconds)))
    # Both runs have ended: a rate or a number of hosts that cannot be emulated refuses nothing.
    except (NetlabError, InvalidArgumentError) as error:
        words = f"no emulated links: {error}. Seconds of the race are computed"
        runs.messages.print(Text(words), soft_wrap=True)
        return [_compute_lap(rate, records) for rate in rates]
    return laps


def _find_period(settings: TrainSettings) -> int:
    """Return the steps from one that sends more than others do to the next; 1 if all send alike."""
    period = settings.every or settings.momentum_sync_every or 1
    return period if period <= settings.steps else 1


def _time_steps(
    runs: Runs, settings: TrainSettings, n_steps: int, folder: Path
) -> Mapping[str, Any]:
    steps = dataclasses.replace(settings, steps=n_steps, eval_every=n_steps)
    record = runs.train(steps, folder, CheckpointSettings())
    assert record is not None  # not under torchrun
    return record.to_json()


def _compute_lap(rate: str, records: Sequence[Mapping[str, Any]]) -> Lap:
    seconds = [compute_seconds(record, parse_rate(rate)) for record in records]
    return Lap(rate, "computed: time here without a link, and bytes / rate", tuple(seconds))


def print_race(console: Console, records: Sequence[Record], laps: Sequence[Lap]) -> None:
    """Show the seconds to the loss that both runs reach, and who is first at the first rate."""
    contents = [record.to_json() for record in records]
    rules = name_runs([record.settings for record in records])
    target = find_target(contents)
    arrivals = [
        [find_arrival(*each, target) for each in zip(contents, lap.seconds, strict=True)]
        for lap in laps
    ]
    table = build_table(
        ("each link", *rules, "seconds are"),
        [
            (lap.rate, *(f"{seconds:.1f} s" for seconds in row), lap.how)
            for lap, row in zip(laps, arrivals, strict=True)
        ],
        left=("each link", "seconds are"),
        title=f"time to a validation loss of {target:.3f}, which both reach",
    )
    print_table(console, table)
    for lap, (first_s, second_s) in zip(laps, arrivals, strict=True):
        (winner, least_s), (loser, most_s) = sorted(
            zip(rules, (first_s, second_s), strict=True), key=lambda each: each[1]
        )
        if least_s > 0:
            words = f"At {lap.rate} {winner} is {most_s / least_s:.1f}x as fast as {loser}."
            console.print(Text(words), soft_wrap=True)


def print_samples(console: Console, records: Sequence[Record]) -> None:
    """Show how each model continues a line of the validation text; nothing for images."""
    samples = [record.sample for record in records]
    if not samples[0]:
        return
    names = name_runs([record.settings for record in records])
    parts = [
        ("a line of the validation text", samples[0]["prompt"]),
        *((f"{name} continues", each["model"]) for name, each in zip(names, samples, strict=True)),
        ("the text continues", samples[0]["data"]),
    ]
    for what, text in parts:
        console.print()
        console.print(Text(f"{what}:"), soft_wrap=True)
        for line in text.splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
    console.print()

"""Compare reported runs on a GPU with the same runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import study_path  # noqa: F401
from cells import Cell, Find, choose_rate, reported
from design import choose_recipe, make_cell
from differences import Difference, find_difference
from evidence import Ending
from runs import RunConfig
from settings import BASES, CAUTIOUS, SHORT

N_CONTROLS = 6
CONTROL_P = 0.05
"""Divided by the number of controls: a p-value below speaks against all runs on a GPU."""


@dataclass(frozen=True)
class Control:
    """A cell on a device beside the same on a CPU.

    Attributes:
        setting: Name of the setting.
        difference: Device minus CPU.
    """

    setting: str
    difference: Difference


def _list_cells(task: str, find: Find) -> list[Cell]:
    adamw = choose_recipe("adamw", task, find).method
    names = [*([] if adamw is None else [adamw]), SHORT, CAUTIOUS]
    return [make_cell(BASES[task], name) for name in names]


def list_open_controls(tasks: list[str], find: Find, find_on_device: Find) -> list[RunConfig]:
    """Return the runs of the controls that are still to be made, at the rates found on a CPU."""
    found = []
    for task in tasks:
        for cell in _list_cells(task, find):
            rate = choose_rate(cell, find).rate
            runs = [] if rate is None else reported(cell, rate)
            found += [run for run in runs if find_on_device(run.name) is None]
    return found


def list_controls(find: Find, find_on_device: Find) -> Iterator[Control]:
    """Compare the two, where all runs of both are there."""
    for task, setting in BASES.items():
        for cell in _list_cells(task, find):
            on_cpu = Ending.find(cell, find)
            records = {seed: find_on_device(each["name"]) for seed, each in on_cpu.records.items()}
            there = {seed: each for seed, each in records.items() if each is not None}
            on_device = Ending(cell, on_cpu.choice, there)
            if on_cpu.is_whole and on_device.is_whole:
                yield Control(setting, find_difference(on_device, on_cpu))

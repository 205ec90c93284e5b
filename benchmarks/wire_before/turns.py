"""The figures of a comparison, and the turns in which two commits are measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distlion_netlab.lab import Lab
from distlion_netlab.launch import run_command

HERE = Path(__file__).resolve().parent
HOST = HERE / "steps_host.py"
BENCHMARKS = HERE.parent
NONE, VOTES, OVERLAP = METHODS = ("none", "majority-auto", "majority-auto-overlap")
MOST_BUCKETS = 32
LOCAL_RULES = ("ScaledVote", "ResidualVote(1)", "ResidualVote(2)", "EstimateVote(2)")

Figures = dict[str, float]
"""Measurements of one turn, by name and unit."""


@dataclass(frozen=True)
class Cell:
    """Training on hosts of a network lab.

    Attributes:
        what: Its name.
        hosts, rate: Of the lab.
        workload: "device" or "gpt".
        sizes: Arguments of the workload.
        steps: Steps of a block.
    """

    what: str
    hosts: int
    rate: str
    workload: str
    sizes: dict[str, float]
    steps: int = 6


SMALL, MEDIUM = {"layers": 8, "width": 1024}, {"layers": 24, "width": 1024}
CELLS = (
    *(
        Cell(f"accelerator, 8.4 M parameters, 4 hosts, {rate}", 4, rate, "device", SMALL)
        for rate in ("100mbit", "1gbit", "10gbit")
    ),
    *(
        Cell(f"accelerator, 25 M parameters, 4 hosts, {rate}", 4, rate, "device", MEDIUM)
        for rate in ("1gbit", "10gbit")
    ),
    # Where hosts share a core, workers that do not communicate run ahead of each other, so that the
    # mean of their times says little.
    Cell("GPT of 8 M on the cores, 2 hosts, 1gbit", 2, "1gbit", "gpt", {}),
)


def run_hosts(python: str, hosts: int, rate: str, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Run a process on each host; return wall and processor seconds of a step, mean of workers.

    Raises:
        RuntimeError: A worker failed.
    """
    with Lab(hosts, rate) as lab, TemporaryDirectory() as folder:
        status = run_command(lab, [python, str(HOST), folder, json.dumps(plan)])
        if status:
            raise RuntimeError(f"a worker ended with status {status}; see above")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(hosts)]
    return {
        name: [statistics.fmean(each) for each in zip(*(of[name] for of in found), strict=True)]
        for name in found[0]
    }


def measure_cell(python: str, cell: Cell) -> Figures:
    """Return what votes take beyond a step without communication, and their processor time."""
    plan = {
        "workload": cell.workload,
        "sizes": cell.sizes,
        "methods": METHODS,
        "steps": cell.steps,
        "blocks": 3,
    }
    found = run_hosts(python, cell.hosts, cell.rate, plan)
    figures = {}
    floor_s, floor_cpu_s = found[NONE]
    for name, said in ((VOTES, "votes"), (OVERLAP, "overlap")):
        step_s, cpu_s = found[name]
        figures[f"{cell.what}: {said}, ms of a step"] = 1e3 * step_s
        figures[f"{cell.what}: {said}, share of full speed"] = floor_s / step_s
        figures[f"{cell.what}: {said}, ms of a worker's processor"] = 1e3 * (cpu_s - floor_cpu_s)
    return figures


def measure_buckets(python: str) -> Figures:
    """Return what a further bucket costs between two hosts."""
    plan = {"elements": 8 << 20, "buckets": [1, MOST_BUCKETS], "steps": 5, "blocks": 8}
    found = run_hosts(python, 2, "unlimited", plan)
    costs = [
        1e3 * (many - one) / (MOST_BUCKETS - 1)
        for one, many in zip(found["1"], found[str(MOST_BUCKETS)], strict=True)
    ]
    units = ("ms of a step", "ms of a worker's processor")
    return {
        f"a further bucket, 2 hosts, {unit}": cost for unit, cost in zip(units, costs, strict=True)
    }


def measure_host_time(python: str) -> Figures:
    """Return a step on 148 small tensors, in units of fused AdamW's."""
    record = run_script([python, str(BENCHMARKS / "host_time.py")])
    seconds = record["processor_s"]["found"]
    return {
        f"{name}, 148 small tensors, times fused AdamW": seconds[name] / seconds["AdamW, fused"]
        for name in ("Lion", "DistributedLion, one worker")
    }


def measure_local_votes(python: str) -> Figures:
    """Return votes of local steps, in units of a majority vote's processor time."""
    launch = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = [str(BENCHMARKS / "local_vote.py"), "--sizes", "1 M", "--turns", "11"]
    record = run_script([*launch, *script, "--rows", *LOCAL_RULES])
    return {
        f"a local vote by {rule}, 1 M parameters, ms of a processor": each["cpu"]["vote_ms"]
        for rule, each in record["votes"]["1 M"].items()
    }


def run_script(command: list[str]) -> dict[str, Any]:
    """Run a benchmark of this folder, and return its record."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        subprocess.run([*command, "--json", str(file)], check=True, stdout=subprocess.DEVNULL)
        record: dict[str, Any] = json.loads(file.read_text())
        return record


PARTS: dict[str, Callable[[str], Figures]] = {
    "host": measure_host_time,
    "local": measure_local_votes,
    "buckets": measure_buckets,
    "cells": lambda python: {
        name: figure for cell in CELLS for name, figure in measure_cell(python, cell).items()
    },
}


def take_turns(
    before: str, parts: tuple[str, ...], turns: int, say: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Measure both commits in turn; yield each figure's name, and its values by commit."""
    pythons = {"before": before, "now": sys.executable}
    for part in parts:
        measured: dict[str, list[Figures]] = {commit: [] for commit in pythons}
        for turn in range(turns):
            # Neither is always the first.
            for commit in list(pythons)[:: 1 if turn % 2 == 0 else -1]:
                say(f"{part}, turn {turn + 1} of {turns}: {commit}")
                measured[commit].append(PARTS[part](pythons[commit]))
        for name in measured["now"][0]:
            yield (
                name,
                {commit: [each[name] for each in of] for commit, of in measured.items()},
            )

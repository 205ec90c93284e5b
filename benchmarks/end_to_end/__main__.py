"""Measure training steps on hosts whose links are limited: ours, DDP's, and no communication.

Hosts are network namespaces of this machine (`distlion netlab`), so this needs Linux and root
rights. Five parts: training on an accelerator that is emulated, while the cores are left to packets
(device); training a GPT on the cores at several rates on 4 hosts, and on 2 with shorter and longer
steps (pair); the exchange of a bare vector; and a small GPT on more and more hosts beside the cost
model's prediction (scaling).

    python benchmarks/end_to_end [--quick] [--json FILE]
                                 [--parts device training pair exchange scaling]
    python benchmarks/end_to_end --again            # pages and figures, from the JSON that is there

Writes FILE, and Markdown and a figure beside it: benchmarks/results/end_to_end.json, or device.json
with the README's figure where that is the only part. It writes nothing after --quick unless --json
is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overview import SWEEP, draw_overview
from parts import (
    DRAWN,
    plan_devices,
    plan_exchange,
    plan_pairs,
    plan_scaling,
    plan_training,
)
from rich.console import Console
from tables import build_tables, list_missing, list_records, write_markdown
from targets import judge

from distlion.errors import DistlionError
from distlion_netlab import SweepSettings, run_sweep
from distlion_netlab.sweep import SweepProgress
from distlion_netlab.sweep_figure import draw_sweep_figure

RESULTS = Path(__file__).resolve().parents[1] / "results" / "end_to_end.json"
DEVICE_RESULTS = RESULTS.with_name("device.json")
PARTS = ("device", "training", "pair", "exchange", "scaling")


class ProgressLine:
    """Report every few seconds where a sweep is."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._started_s = time.monotonic()
        self._due_s = 0.0

    def __call__(self, progress: SweepProgress) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s or progress.done == progress.total:
            self._due_s = now_s + 3
            done = f"{progress.done}/{progress.total}"
            elapsed = f"{now_s - self._started_s:4.0f} s"
            print(f"{self._part} {elapsed} {done} {progress.what}", file=sys.stderr, flush=True)


def measure(part: str, settings: SweepSettings) -> dict[str, Any]:
    return run_sweep(settings, ProgressLine(part))


def measure_parts(
    parts: list[str], *, quick: bool, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure the parts; what there is so far is kept after each sweep of devices."""
    result: dict[str, Any] = {}
    if "device" in parts:
        result["device"] = {}
        for name, settings in plan_devices(quick=quick).items():
            result["device"][name] = measure(name, settings)
            keep(result)
    if "training" in parts:
        result["training"] = measure("training", plan_training(quick=quick))
    if "pair" in parts:
        result["pair"] = {
            sequences: measure(f"2 hosts, {sequences} sequences", settings)
            for sequences, settings in plan_pairs(quick=quick).items()
        }
    if "exchange" in parts:
        result["exchange"] = measure("exchange", plan_exchange(quick=quick))
    if "scaling" in parts:
        result["scaling"] = {
            hosts: measure(f"{hosts} hosts", settings)
            for hosts, settings in plan_scaling(quick=quick).items()
        }
    return result


def read_conditions(result: dict[str, Any]) -> dict[str, Any]:
    """Join what the records say of the machine with how this program was called."""
    first = list_records(result)[0]
    return {
        "command": " ".join(["python benchmarks/end_to_end", *sys.argv[1:]]),
        "commit": read_commit(),
        **first["conditions"],
        "threads_of_a_worker": 1,
    }


def read_commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python benchmarks/end_to_end", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of small models")
    parser.add_argument("--again", action="store_true", help="measure nothing: write pages again")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    default = DEVICE_RESULTS if args.parts == ["device"] else RESULTS
    args.json = args.json or (None if args.quick else default)
    return args


def write(result: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    write_pages(file)


def write_pages(file: Path) -> None:
    """Write the Markdown and the figures of a JSON file."""
    result = json.loads(file.read_text())
    file.with_suffix(".md").write_text(write_markdown(result))
    if "training" in result:
        record = result["training"]
        drawn = [name for name in DRAWN if name in record["settings"]["methods"]]
        draw_sweep_figure(record, file.with_suffix(".png"), methods=drawn)
    if file == DEVICE_RESULTS and SWEEP in result["device"]:
        draw_overview(result["device"][SWEEP], file.with_name("step_time.png"))


def main() -> None:
    args = read_arguments()
    if args.again:
        for file in (RESULTS, DEVICE_RESULTS):
            write_pages(file)
        return

    def complete(result: dict[str, Any]) -> dict[str, Any]:
        targets = judge(result, quick=args.quick)
        return {"conditions": read_conditions(result), "targets": targets, **result}

    def keep(result: dict[str, Any]) -> None:
        if args.json:
            write(complete(result), args.json)

    try:
        result = complete(measure_parts(args.parts, quick=args.quick, keep=keep))
    except DistlionError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # Without a terminal, rich takes 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(*build_tables(result))
    for name, reason in list_missing(result):
        print(f"{name} was left out ({reason})")
    if args.json:
        write(result, args.json)


if __name__ == "__main__":
    main()

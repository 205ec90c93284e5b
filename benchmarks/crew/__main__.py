"""Train on while workers are lost, stopped and added: distlion's crew, torchft and torchelastic.

    python benchmarks/crew [--parts soak systems stops timeline cost sizes losses]
                           [--seed 0] [--json] [--results FOLDER] [--events 200] [--rounds 3]
                           [--round-events 8] [--turns 6] [--sizes 25m 125m]
                           [--rates unlimited 1gbit] [--systems crew] [--start-with 3]

Part soak: three to six processes of this machine train one small network as a crew; they are killed
by SIGKILL, held by SIGSTOP for 1 to 10 s, and joined by newcomers, as a seed draws it. All numbers
come from logs in which each worker writes a line for each committed step. 200 events take about
half an hour.

Part systems: the same for distlion's crew, torchft and torchelastic in turns; in each round each of
them starts afresh and goes through the same events.

Part stops: the same for the first two of them, with nothing but workers that SIGSTOP holds for 6 s.

Part timeline: one crew, a worker that SIGSTOP holds for 6 s, two that are killed and two that come,
one after the other; when each step was committed. benchmarks/pictures.py draws it.

Part cost: a step with a crew beside a step without one, on hosts of the network lab (needs root),
without a limit and at 1 Gbit/s, and beside more steps without one, as a control. They take turns.

Part sizes: distlion's crew and torchft with larger networks, whose workers are on hosts of the
network lab (needs root): joins, kills and a stop. 125 million parameters take up to 20 GiB. With
--start-with 2 they share a machine's cores with one worker less.

Part losses: all workers are killed at one moment and start again, from a checkpoint: distlion's
crew, torchft and torchelastic, on hosts of the network lab (needs root).

torchft has an interpreter of its own, for it is no part of the project:

    python -m venv build/venv-torchft
    build/venv-torchft/bin/pip install -c constraints.txt torchft==0.2.0 numpy

Without it torchft is left out. Prints Markdown, or JSON with --json; with --results also writes
crew_PART.json and crew_PART.md into FOLDER. With --add, rows of the parts "sizes" and "losses" that
this call does not measure stay there.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from event_plan import (
    FEWEST,
    MOST,
    START_LARGE_WITH,
    PlannedEvent,
    plan_events,
    plan_losses,
    plan_sizes,
    plan_stops,
    plan_timeline,
)
from fleet import SoakError
from reading import read_logs, summarize, trace_steps
from soak_run import play, run_soak
from step_cost import measure_cost
from systems import COMPARED, SIZED, SYSTEMS, build_system, is_there
from tables import write_cost, write_losses, write_sizes, write_soak, write_timeline
from training_load import MIN_WORKERS, SAVE_EVERY, SIZE, SIZES, Size

from distlion_netlab import Lab

PARTS = ("soak", "systems", "stops", "timeline", "cost", "sizes", "losses")
WRITERS = {
    "cost": write_cost,
    "losses": write_losses,
    "sizes": write_sizes,
    "timeline": write_timeline,
}
PLACES = ("--keep", "--results")


def read_conditions() -> dict[str, Any]:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": " ".join(["python benchmarks/crew", *list_options(sys.argv[1:])]),
        "commit": answer.stdout.strip() or "unknown",
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def list_options(arguments: list[str]) -> list[str]:
    """Return arguments without those that say where results go."""
    kept = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument not in (*PLACES, "--json") and before not in PLACES:
            kept.append(argument)
    return kept


def describe(size: Size) -> str:
    """Describe a network, and how fast it is trained."""
    return f"{'-'.join(map(str, size.widths))}, a step every {size.pace_s:g} s or later"


def play_soaks(systems: list[str], plans: list[list[PlannedEvent]], folder: Path) -> dict[str, Any]:
    """Let systems take turns; one that does not run is noted and left out from then on."""
    conditions = read_conditions() | {
        "workers": f"{FEWEST} to {MOST}; {MIN_WORKERS} at least to train",
        "network": describe(SIZE),
    }
    runs: list[dict[str, Any]] = []
    missing = {name: "not installed" for name in systems if not is_there(name)}
    for number, plan in enumerate(plans):
        for name in (name for name in systems if name not in missing):
            place = folder / f"{name}-{number}"
            try:
                record = run_soak(name, plan, place)
            except SoakError as error:
                missing[name] = f"in round {number}: {error}"
                continue
            summary = summarize(read_logs(place), record)
            runs.append({"system": name, "tuning": record["tuning"], "round": number, **summary})
    conditions["load_average_after"] = round(os.getloadavg()[0], 2)
    return {"conditions": conditions, "left_out": missing, "runs": runs}


def plan_of(part: str, size: Size, start_with: int) -> list[PlannedEvent]:
    """Return the plan of a part for a size; all are lost between two checkpoints."""
    if part == "losses":
        return plan_losses(SAVE_EVERY)
    return plan_sizes(size.silence_s + 5.0, start_with)


def play_sizes(part: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let systems take turns with each size and rate, in parts "sizes" and "losses"."""
    now = read_conditions()
    conditions = {name: now[name] for name in ("torch", "python", "cores")}
    conditions["networks"] = "; ".join(f"{name}: {describe(size)}" for name, size in SIZES.items())
    systems = args.systems or (SIZED if part == "sizes" else COMPARED)
    missing = {name: "not installed" for name in systems if not is_there(name)}
    runs: list[dict[str, Any]] = []
    for size, number, rate, name in product(args.sizes, range(args.rounds), args.rates, systems):
        if name in missing:
            continue
        plan, load = plan_of(part, SIZES[size], args.start_with), os.getloadavg()[0]
        place = folder / f"{size}-{rate}-{name}-{number}"
        place.mkdir(parents=True)
        n_workers = max(args.start_with, 1 + max(event.worker for event in plan))
        with Lab(1 + n_workers, rate) as lab:
            conditions["tcp_congestion_control"] = lab.congestion_control
            system = build_system(name, place, size, lab, saves=part == "losses")
            record = play(system, plan, args.start_with)
        summary = summarize(read_logs(place), record)
        told = {"system": name, "size": size, "rate": rate, "round": number}
        told["workers"] = args.start_with
        told |= {"tuning": record["tuning"], "n_parameters": SIZES[size].n_parameters}
        loads = f"load average {load:.2f} to {os.getloadavg()[0]:.2f}"
        told["measured"] = f"{now['commit']}, {now['date']}, {loads}"
        runs.append({**told, **summary})
    return {"conditions": conditions, "left_out": missing, "runs": runs}


def add_runs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the runs of two; later ones replace those of their rows."""
    places = {_find_place(run) for run in after["runs"]}
    runs = [run for run in before["runs"] if _find_place(run) not in places] + after["runs"]
    runs.sort(key=lambda run: (run["n_parameters"], *_find_place(run)[1:], run["round"]))
    left_out = before["left_out"] | after["left_out"]
    measured = {run["system"] for run in runs} | {f"{run['system']}, {run['size']}" for run in runs}
    left_out = {name: why for name, why in left_out.items() if name not in measured}
    return {**after, "left_out": left_out, "runs": runs}


def _find_place(run: dict[str, Any]) -> tuple[str, int, str, str]:
    return run["size"], run["workers"], run["rate"], run["system"]


def play_timeline(folder: Path) -> dict[str, Any]:
    """Let one crew go through one event of each kind, and more; note each step."""
    conditions = read_conditions() | {"niceness": os.nice(0), "network": describe(SIZE)}
    record = run_soak("crew", plan_timeline(), folder / "timeline")
    lines = read_logs(folder / "timeline")
    summary = summarize(lines, record)
    del summary["growth"]
    conditions["load_average_after"] = round(os.getloadavg()[0], 2)
    found = {"conditions": conditions, "tuning": record["tuning"], "summary": summary}
    return found | trace_steps(lines, summary.pop("events"))


def measure(part: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if part == "cost":
        found = measure_cost(args.turns)
        return found | {"conditions": read_conditions() | found["conditions"]}
    if part == "timeline":
        return play_timeline(folder)
    if part == "soak":
        return play_soaks(["crew"], [plan_events(args.events, args.seed)], folder)
    if part in ("sizes", "losses"):
        return play_sizes(part, args, folder)
    seeds = range(args.seed, args.seed + args.rounds)
    if part == "stops":
        plans = [plan_stops(args.round_events, seed) for seed in seeds]
        return play_soaks(["crew", "torchft"], plans, folder)
    plans = [plan_events(args.round_events, seed) for seed in seeds]
    return play_soaks(list(COMPARED), plans, folder)


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/crew", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=200, help="of the soak")
    parser.add_argument("--rounds", type=int, default=3, help="of all systems")
    parser.add_argument("--round-events", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6, help="starts of all processes of part cost")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["25m", "125m"])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="of sizes and losses")
    parser.add_argument(
        "--start-with", type=int, default=START_LARGE_WITH, help="workers at the start"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--results", type=Path, help="folder of the JSON and Markdown")
    parser.add_argument("--add", action="store_true", help="keep other rows of sizes and losses")
    parser.add_argument("--keep", type=Path, help="folder of the logs, which are lost otherwise")
    args = parser.parse_args()
    # So that all processes are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.results is not None:  # before half an hour of measurements
        args.results.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="distlion-soak-") as folder:
            result = measure(part, args, args.keep or Path(folder))
        write = WRITERS.get(part, write_soak)
        result = json.loads(json.dumps(result))
        if args.results is not None:
            file = args.results / f"crew_{part}.json"
            if args.add and part in ("sizes", "losses") and file.exists():
                result = add_runs(json.loads(file.read_text()), result)
            file.write_text(json.dumps(result, indent=1) + "\n")
            file.with_suffix(".md").write_text(write(result))
        print(json.dumps(result) if args.json else write(result))


if __name__ == "__main__":
    main()

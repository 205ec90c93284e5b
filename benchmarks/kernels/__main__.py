"""Measure the CPU core: against the memory's streaming rate, other Lions and other bit packers.

Every repetition runs all contestants of a group once, in random order. A ratio is taken within one
repetition; tables give the median over repetitions and the quartiles. Data is float32 and far
larger than the caches, unless --params is small.

    python benchmarks/kernels [--quick] [--params N] [--tensors N] [--repetitions N]
        [--threads 1 2] [--no-compile] [--instruction-set NAME] [--results FOLDER]

Writes kernels.json, and kernels.md from it, into FOLDER: benchmarks/results, but nowhere after
--quick.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from contestants import EVICTION_ELEMENTS, PARAMS_MULTIPLE, Contestants, Data
from rich.console import Console
from rows import GROUPS, Group, Row
from tables import build_tables, write_markdown

from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels

RESULTS = Path(__file__).resolve().parents[1] / "results"
Times = dict[str, list[float]]


def time_call(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def warm_up(contestants: Contestants) -> dict[str, str]:
    """Call each once; drop what cannot be compiled, and return why."""
    missing: dict[str, str] = {}
    for name, call in list(contestants.items()):
        try:
            call()
        except RuntimeError as error:
            if name != "compiled":
                raise
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del contestants[name]
    return missing


def time_in_turn(contestants: Contestants, repetitions: int, cold: bool) -> Times:
    evicting = torch.ones(EVICTION_ELEMENTS if cold else 0)
    order = list(contestants)
    shuffler = random.Random(0)
    times: Times = {name: [] for name in order}
    for _ in range(repetitions):
        shuffler.shuffle(order)
        for name in order:
            evicting.sum()
            times[name].append(time_call(contestants[name]))
    return times


def summarize(values: list[float]) -> dict[str, float]:
    q1, median, q3 = quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def measure_row(row: Row, times: Times, n_params: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": row.name,
        "unit": "ratio" if row.under else "GB/s",
        "target": row.target,
        "at_least": row.at_least,
        "median": None,
        "q1": None,
        "q3": None,
        "met": None,
    }
    if not {*row.over, *row.under} <= times.keys():
        return result
    over = [sum(turn) for turn in zip(*(times[name] for name in row.over), strict=True)]
    if row.under:
        under = [sum(turn) for turn in zip(*(times[name] for name in row.under), strict=True)]
        result |= summarize([a / b for a, b in zip(over, under, strict=True)])
    else:
        result |= summarize([row.bytes_each * n_params / 1e9 / seconds for seconds in over])
    if row.target is not None:
        met = result["median"] >= row.target if row.at_least else result["median"] <= row.target
        result["met"] = met
    return result


def measure_group(group: Group, data: Data, args: argparse.Namespace) -> tuple[dict, dict]:
    """Return what the JSON says of the group, and what could not be measured."""
    contestants = group.build(data)
    missing = warm_up(contestants)
    times = time_in_turn(contestants, args.repetitions, group.cold)
    return {
        "title": group.title,
        "rows": [measure_row(row, times, data.n_params) for row in group.rows],
        "seconds": {name: summarize(values) for name, values in times.items()},
    }, missing


def measure(data: Data, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(threads)
    groups: list[dict[str, Any]] = []
    missing = {} if data.compiles else {"compiled": "left out on request"}
    for group in GROUPS:
        started = time.perf_counter()
        print(f"{threads} threads: {group.title} ...", end="", file=sys.stderr, flush=True)
        measured, absent = measure_group(group, data, args)
        groups.append(measured)
        missing |= absent
        print(f" {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return {"groups": groups, "missing": missing}


def read_conditions(args: argparse.Namespace, kernels: CpuKernels) -> dict[str, Any]:
    return {
        "date": dt.date.today().isoformat(),
        "command": " ".join(["python benchmarks/kernels", *sys.argv[1:]]),
        "cpu": read_cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "instruction_set": kernels.instruction_set,
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "lion_pytorch": version("lion-pytorch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "compiler": read_compiler(),
        "params": args.params,
        "tensors": args.tensors,
        "dtype": "float32",
        "repetitions": args.repetitions,
        "threads": args.threads,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def read_cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def read_compiler() -> str:
    """Ask the C++ compiler that torch.compile calls for its version."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "none"
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout.splitlines() or ["unknown"])[0]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python benchmarks/kernels", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run of seconds, without torch.compile"
    )
    parser.add_argument("--params", type=int, help="default: 64 Mi; 1 Mi with --quick")
    parser.add_argument("--tensors", type=int, default=1, help="how many share the parameters")
    parser.add_argument("--repetitions", type=int, help="default: 7; 2 with --quick")
    default = [n for n in (1, 2) if n <= (os.cpu_count() or 1)]
    parser.add_argument("--threads", type=int, nargs="+", default=default)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--instruction-set", choices=INSTRUCTION_SETS)
    parser.add_argument("--results", type=Path, help="folder of kernels.json and kernels.md")
    args = parser.parse_args()
    args.params = args.params or (1 << 20 if args.quick else 64 << 20)
    args.repetitions = args.repetitions or (2 if args.quick else 7)
    args.no_compile |= args.quick
    args.results = args.results or (None if args.quick else RESULTS)
    if args.params % (PARAMS_MULTIPLE * args.tensors):
        parser.error(f"--params must be a multiple of {PARAMS_MULTIPLE} for each tensor")
    if args.repetitions < 2:
        parser.error("--repetitions must be 2 or more")
    return args


def main() -> None:
    args = read_arguments()
    kernels = CpuKernels(args.instruction_set)
    result = {"conditions": read_conditions(args, kernels)}
    torch.set_grad_enabled(False)
    data = Data(args.params, args.tensors, kernels, compiles=not args.no_compile)
    result["runs"] = {str(threads): measure(data, threads, args) for threads in args.threads}
    result["conditions"] |= {
        "load_average_after": round(os.getloadavg()[0], 2),
        # Linux counts in KiB, macOS in bytes.
        "peak_memory_gib": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            / (2**30 if sys.platform == "darwin" else 2**20),
            2,
        ),
    }
    # Without a terminal, rich takes 80 columns.
    Console(width=None if sys.stdout.isatty() else 120).print(*build_tables(result))
    for threads, run in result["runs"].items():
        for name, reason in run["missing"].items():
            print(f"{threads} threads: {name} was not measured ({reason})")
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        file = args.results / "kernels.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(write_markdown(json.loads(file.read_text())))


if __name__ == "__main__":
    main()

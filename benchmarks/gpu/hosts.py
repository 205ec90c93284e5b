"""Steps of GPT-2 on hosts with a GPU, over links of limited rates: all hosts share the device.

Hosts are network namespaces of this machine (`distlion netlab`), so this needs root rights, and
``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import trace_path  # noqa: F401
from bucket_parts import PARTS, find_medians
from conditions import ask
from tracing import Place, trace_bucket

from distlion_netlab import GptWorkload, SweepSettings, run_sweep
from distlion_netlab.sweep import SweepProgress

Record = dict[str, Any]

GPT2 = GptWorkload(
    layers=12,
    width=768,
    heads=12,
    vocabulary=50304,
    context=1024,
    batch_size=12,
    backwards=4,
    ties_embeddings=True,
    device="cuda",
)
TINY = GptWorkload(layers=1, width=32, heads=2, vocabulary=64, batch_size=1, context=8, backwards=2)
VOTES, OVERLAP, LOCAL = "majority-auto", "majority-auto-overlap", "local-8"
GRADIENTS = ("ddp-fp32", "ddp-fp16", "ddp-powersgd")
METHODS = ("none", VOTES, OVERLAP, LOCAL, *GRADIENTS)
# A step of DDP takes a minute at 100 Mbit/s.
SLOW_METHODS = ("none", VOTES, OVERLAP, LOCAL, "ddp-powersgd")
CELLS = {
    f"{hosts} hosts, {rate}": (hosts, rate)
    for rate in ("unlimited", "10gbit", "1gbit", "100mbit")
    for hosts in (4, 2)
}
TRACE = "trace of a bucket"
AIMS = {"4 hosts, 10gbit": 0.97, "4 hosts, 1gbit": 0.90}
"""Shares of the speed without communication, with overlap."""


def plan_cell(hosts: int, rate: str, *, rehearses: bool) -> SweepSettings:
    """Plan the sweep of a cell."""
    methods = SLOW_METHODS if rate == "100mbit" else METHODS
    workload = TINY if rehearses else GPT2
    return SweepSettings(
        hosts, (rate,), methods, workload, repetitions=3, block_s=0.0, predicts=False
    )


def measure_hosts(results: Path | None, seconds: float, *, rehearses: bool) -> Record:
    """Measure the cells that are not there yet, then trace a bucket; write the record after each.

    Args:
        results: Folder of gpu/hosts.json, whose cells of this commit stay; None for none.
        seconds: After which nothing further begins.
        rehearses: Whether the model is tiny, and trains on the CPU.
    """
    commit, started = ask("git", "rev-parse", "HEAD"), time.monotonic()
    file = None if results is None else results / "gpu" / "hosts.json"
    found = read_earlier(file, commit)
    cells: dict[str, Record] = found["cells"]
    names = ["2 hosts, 100mbit"] if rehearses else list(CELLS)
    with mock.patch.dict(os.environ):  # a rehearsal's workers take the kernels of their CPU
        for variable in ("DISTLION_KERNELS", "TRITON_INTERPRET") if rehearses else ():
            os.environ.pop(variable, None)
        for name in names:
            if name in cells or time.monotonic() - started > seconds:
                continue
            cells[name] = run_sweep(plan_cell(*CELLS[name], rehearses=rehearses), report(name))
            write_found(file, commit, found)
        left = [name for name in names if name not in cells]
        if not left and TRACE not in found and time.monotonic() - started <= seconds:
            found[TRACE] = trace_hosts(rehearses=rehearses)
    left += [TRACE] * (TRACE not in found)
    found = {"commit": commit, **found}
    if left:
        found["error"] = f"time is up; run it again for {', '.join(left)}"
    return {"ok": not left and found[TRACE]["ok"], **found}


def trace_hosts(*, rehearses: bool) -> Record:
    """Trace a bucket between two hosts, over Gloo and over own sockets."""
    try:
        if rehearses:
            traced = trace_bucket(Place(2, "1gbit"), 1 << 16, steps=3, turns=1)
        else:
            traced = trace_bucket(Place(2, "10gbit", device="cuda"), 1_000_000, turns=1)
    except Exception as error:  # noqa: BLE001 - the cells stay
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"ok": True, **traced}


def read_earlier(file: Path | None, commit: str | None) -> Record:
    """Return the cells of an earlier run of the same commit, and its trace."""
    record = {} if file is None or not file.exists() else json.loads(file.read_text())
    if record.get("commit") != commit:
        record = {}
    found = {"cells": record.get("cells", {})}
    if record.get(TRACE, {}).get("ok"):
        found[TRACE] = record[TRACE]
    return found


def write_found(file: Path | None, commit: str | None, found: Record) -> None:
    """Write what there is so far, in place of the record that the part ends with."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    conditions = {"command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])}
    record = {"conditions": conditions, "ok": False, "commit": commit, **found}
    file.write_text(json.dumps(record, indent=1) + "\n")


def report(cell: str) -> Callable[[SweepProgress], None]:
    """Return an observer that says on stderr, now and then, where a cell is."""
    due_s = 0.0

    def observe(progress: SweepProgress) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + 3
            print(f"\n  {cell}: {progress.what}", end="", file=sys.stderr, flush=True)

    return observe


def list_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield a row for each cell and method: seconds, shares of the full speed, of a processor."""
    for cell, sweep in record["cells"].items():
        ((_, methods),) = sweep["results"].items()
        for name, found in methods.items():
            share = found["speed_up"]["none"]["median"]
            aim = AIMS.get(cell) if name == OVERLAP else None
            met = "" if aim is None else f"{aim:.0%}: {'yes' if share >= aim else 'NO'}"
            ddp = found["speed_up"].get("ddp-fp16")
            yield (
                cell,
                name,
                f"{found['seconds']['median']:.3f}",
                f"{share:.0%}",
                "" if ddp is None else f"{ddp['median']:.2f}",
                f"{found['cpu_s']:.2f}",
                met,
            )
        for name, reason in sweep["missing"].items():
            yield cell, name, "left out", reason.splitlines()[0], "", "", ""


HEADS = (
    *("hosts and links", "method", "step, s", "of full speed", "times as fast as DDP fp16"),
    *("processor seconds, all workers", "aim"),
)


def list_parts(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield a row for each part of a bucket: milliseconds over Gloo, and over own sockets."""
    steps = record.get(TRACE, {}).get("steps", {})
    medians = [find_medians(each) for each in steps.values()]
    for part in PARTS if medians else ():
        yield part, *(f"{parts[part] / 1e3:.2f}" for parts in medians)


PARTS_HEADS = ("a bucket between 2 hosts", "Gloo, ms", "own sockets, ms")

"""Do everything that takes a GPU, and write down what came of it.

    python benchmarks/gpu [PART ...] [--rehearse] [--results FOLDER] [--data FOLDER] [--seconds S]

Parts, all of them where none is named:

    conformance  the tests of the kernels, on the device
    memory       some of them under compute-sanitizer
    cast         the device's rounding to bfloat16 against that of integers, for all float32
    ranks        two ranks on the device, and one beside one without: bits, waits, launches
    ops          every op against the rate of a copy
    steps        step() beside that of other optimizers
    orthogonal   encoding of GPT-2's matrices, plain and with orthogonalized directions
    hosts        steps of GPT-2 on 2 and 4 hosts, each with the GPU, over links of limited rates;
                 a trace of one bucket
    text         a GPT of 86 M parameters, 4 virtual workers, 600 steps, on the texts of --data

Writes the record of each part, with its conditions, to gpu/PART.json in FOLDER, which is
benchmarks/results, and a table of all records there to gpu.md: a part that is run again replaces
its own record alone. hosts writes after each cell, and goes on with those that are missing.
--rehearse runs every part tiny, on the CPU with interpreted kernels, and
writes only where --results says: it shows that this program works, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REHEARSAL = {"DISTLION_KERNELS": "triton", "TRITON_INTERPRET": "1"}
RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTS = ("conformance", "memory", "cast", "ranks", "ops", "steps", "orthogonal", "hosts", "text")


def list_parts(args: argparse.Namespace) -> dict[str, Callable[..., dict[str, Any]]]:
    """Import what the parts are made of: Triton asks when it is imported whether to interpret."""
    from checks import check_cast, check_conformance, check_memory, check_ranks
    from hosts import measure_hosts
    from orthogonal import measure_orthogonal
    from rates import measure_ops, measure_steps
    from text import compare_text

    functions = (check_conformance, check_memory, check_cast, check_ranks)
    functions += (measure_ops, measure_steps, measure_orthogonal)
    functions += (partial(measure_hosts, args.results, args.seconds),)
    functions += (partial(compare_text, args.data),)
    return dict(zip(PARTS, functions, strict=True))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python benchmarks/gpu", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny, interpreted on the CPU")
    parser.add_argument("--results", type=Path, help="folder of gpu/PART.json and gpu.md")
    parser.add_argument("--data", type=Path, help="folder of *.txt; default: Python's library")
    parser.add_argument("--seconds", type=float, default=480, help="of hosts; then end")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    args.results = args.results or (None if args.rehearse else RESULTS)
    return args


def run_part(name: str, part: Callable[..., dict[str, Any]], *, rehearses: bool) -> dict[str, Any]:
    started = time.perf_counter()
    print(f"{name} ...", end="", file=sys.stderr, flush=True)
    try:
        record = part(rehearses=rehearses)
    except Exception as error:  # noqa: BLE001 - the parts after it can still be measured
        record = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    record["seconds"] = round(time.perf_counter() - started, 1)
    verdict = "ok" if record["ok"] else "FAILED"
    print(f" {verdict}, {record['seconds']:.0f} s", file=sys.stderr, flush=True)
    return record


def write_record(results: Path, name: str, record: dict[str, Any]) -> None:
    """Write the record of a part, and the table of all that lie beside it."""
    from tables import write_markdown

    folder = results / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    files = {name: folder / f"{name}.json" for name in PARTS}
    records = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    (results / "gpu.md").write_text(write_markdown(records))


def main() -> int:
    args = read_arguments()
    if args.rehearse:
        os.environ.update(REHEARSAL)
    from conditions import read_conditions
    from tables import write_markdown

    from distlion_lab.planning.accelerator import explain_missing_cuda

    if not args.rehearse and (missing := explain_missing_cuda()):
        print(f"no GPU: {missing} (--rehearse shows that this program works)", file=sys.stderr)
        return 1
    parts, records = list_parts(args), {}
    conditions = read_conditions(rehearses=args.rehearse)
    for name in args.parts or PARTS:
        found = run_part(name, parts[name], rehearses=args.rehearse)
        records[name] = {"conditions": conditions, **found}
        if args.results:  # after each part: a later one may be cut off
            write_record(args.results, name, records[name])
    print(write_markdown(records))
    failed = [name for name, record in records.items() if not record["ok"]]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

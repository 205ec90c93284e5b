"""What must hold on a device: conformance, memory, the same bits on all ranks, one wait."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from conditions import ROOT

from distlion.votes import RULES

LISTED = [name for name, named in RULES.items() if named.listed]
CASES = [(rule, *overlap) for rule in LISTED for overlap in ((), ("overlap",))] + [
    ("majority", "cautious"),
    ("average", "weighted"),
    ("scaled", "local"),
]
"""Rules, with options; local steps have a rule of their own."""
KINDS = ("host and host", "device and device", "device and host")
SIZES, TINY_SIZES = [70, 1_000_003, 1, 4096 * 64], [70, 4200, 1]
MOST_CALLS, MORE_CALLS = 12, 1
"""Launches and copies of a bucket in a step, and with overlap, which also samples gradients."""
COUNTED_BY_PARAMETER = "feedback"
"""Rules whose votes take several of torch's own ops for each parameter: not limited."""
RANK_LIMIT_S = 600
TESTS_LIMIT_S = 3600


def check_conformance(*, rehearses: bool) -> dict[str, Any]:
    """Run the tests of the kernels on the device, every op, dtype and size."""
    words = "test_sums_of_blocks" if rehearses else "cuda"
    return run_tests("tests/kernels", "tests/votes/test_cut_parameters.py", words=words)


def check_memory(*, rehearses: bool) -> dict[str, Any]:
    """Run one test of each op under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None and not rehearses:
        return {"ok": False, "missing": "compute-sanitizer, of the CUDA toolkit"}
    # Whatever processes share the tests, all are checked.
    before = () if rehearses else (tool, "--target-processes", "all", "--error-exitcode", "9")
    # A checked kernel takes tens of times as long: no millions.
    words = (
        "test_a_packed_tensor" if rehearses else "triton and cuda and conformance and not million"
    )
    return run_tests("tests/kernels", words=words, before=before)


def run_tests(*paths: str, words: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *paths, "-k", words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TESTS_LIMIT_S,
    )
    return judge_tests(ended.stdout, ended.returncode, is_checked=bool(before))


def judge_tests(out: str, code: int, *, is_checked: bool) -> dict[str, Any]:
    """Read what pytest said, and after it the checker of memory, once for each process."""
    lines = out.strip().splitlines()
    summary = next((line for line in reversed(lines) if re.search(r"\d+ passed", line)), "")
    n_passed = int(found[1]) if (found := re.search(r"(\d+) passed", summary)) else 0
    faults = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", out)]
    ok = code == 0 and n_passed > 0 and not any(faults) and bool(faults) == is_checked
    record = {"ok": ok, "summary": summary, "passed": n_passed}
    if is_checked:
        record |= {"processes_checked": len(faults), "errors": sum(faults)}
    return record if ok else record | {"tail": lines[-40:]}


def check_cast(*, rehearses: bool) -> dict[str, Any]:
    """Compare the integer rounding to bfloat16 with the device's own, for all float32 patterns."""
    device = "cpu" if rehearses else "cuda"
    chunk = 1 << (16 if rehearses else 25)  # and some 40 bytes of scratch for each
    differing = compared = 0
    for start in range(-(1 << 31), (-(1 << 31) + chunk) if rehearses else (1 << 31), chunk):
        bits = torch.arange(start, start + chunk, dtype=torch.int64, device=device).to(torch.int32)
        values = bits.view(torch.float32)
        unsigned = bits.to(torch.int64) & 0xFFFFFFFF
        rounded = ((unsigned + 0x7FFF + ((unsigned >> 16) & 1)) >> 16) & 0xFFFF
        cast = values.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
        is_number = ~values.isnan()
        differing += int(((rounded != cast) & is_number).sum())
        compared += int(is_number.sum())
    return {"ok": differing == 0, "compared": compared, "differing": differing}


def check_ranks(*, rehearses: bool) -> dict[str, Any]:
    """Train two ranks of one device, and one with a device beside one without.

    The kinds of ranks run beside each other: what takes how long is not asked.
    """
    cases = CASES[:2] + CASES[-3:] if rehearses else CASES
    with ThreadPoolExecutor(len(KINDS)) as pool:
        pairs = list(pool.map(lambda kind: train_ranks(kind, cases, rehearses=rehearses), KINDS))
    judged = [
        judge_ranks(case, [row for pair in pairs for row in (pair[0][place], pair[1][place])])
        for place, case in enumerate(cases)
    ]
    return {"ok": all(each["ok"] for each in judged), "cases": judged}


def judge_ranks(case: tuple[str, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge one case by what ranks said: first those that are both on the host."""
    rule, *options = case
    same_bits = all(row["digests"] == rows[0]["digests"] for row in rows)
    calls = [row["calls"] for row in rows if row["calls"]]
    n = rows[0]["buckets"]
    most_waits = max((each["waits"] for each in calls), default=None)
    most_calls = max((each["launches"] + each["copies"] for each in calls), default=None)
    is_limited = most_calls is not None and not rule.startswith(COUNTED_BY_PARAMETER)
    limit = n * (MOST_CALLS + MORE_CALLS * ("overlap" in options)) if is_limited else None
    return {
        "rule": rule,
        "options": " ".join(options),
        "buckets": n,
        "same_bits": same_bits,
        "waits": most_waits,
        "launches_and_copies": most_calls,
        "at_most": limit,
        "ok": same_bits
        and (most_waits is None or most_waits <= n)
        and (limit is None or most_calls <= limit),
    }


def train_ranks(
    kind: str, cases: list[tuple[str, ...]], *, rehearses: bool
) -> list[list[dict[str, Any]]]:
    """Train two ranks, each a process; return what they say of each case."""
    command = [sys.executable, Path(__file__).with_name("rank.py"), "--cases", json.dumps(cases)]
    command += ["--steps", "4" if rehearses else "20"]
    command += ["--sizes", *map(str, TINY_SIZES if rehearses else SIZES)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank, where in enumerate(kind.split(" and ")):
        on_device = where == "device"
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **world, "MASTER_PORT": str(port)}
        if rehearses and on_device:
            environment |= {"DISTLION_KERNELS": "triton", "TRITON_INTERPRET": "1"}
        elif rehearses:
            environment.pop("DISTLION_KERNELS", None)
        device = "cuda" if on_device and not rehearses else "cpu"
        ranks.append(
            subprocess.Popen(
                [*command, "--device", device],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [read_rank(process, kind) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def read_rank(process: subprocess.Popen[str], what: str) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=RANK_LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"{what}: a rank ended with {process.returncode}:\n{err}")
    found: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return found

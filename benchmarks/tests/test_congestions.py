"""The benchmark of congestion controls: its table from made-up seconds, and a short run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from programs import BENCHMARKS, imported_modules


@pytest.fixture
def program() -> Iterator[ModuleType]:
    pytest.importorskip("pyroute2")
    with imported_modules(BENCHMARKS, "congestion") as (found,):
        yield found


def test_ratios_are_those_of_turns(program: ModuleType) -> None:
    seconds = {"cubic": [0.001, 0.002, 0.003], "bbr": [0.002, 0.004, 0.003]}
    rows = [{"rate": "1gbit", "peer_bytes": 65536, "seconds": seconds}]
    *_, line = program.write_table(rows, ["cubic", "bbr"])
    assert line == "| 1gbit | 64 | 2 | 3 | 2.00 (1.50 - 2.00) |"


@pytest.mark.root
@pytest.mark.parametrize("where", [["--rates", "unlimited"], ["--loopback"]], ids=" ".join)
def test_a_short_run_times_every_congestion_control(where: list[str]) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("a network lab needs root rights")
    if importlib.util.find_spec("pyroute2") is None:
        pytest.skip("the package pyroute2 is not installed")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    command = [sys.executable, str(BENCHMARKS / "congestion.py")]
    ended = subprocess.run(
        [*command, "--turns", "2", *where, "--kilobytes", "1", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    head, _, *rows, load = ended.stdout.splitlines()
    assert "reno, ms" in head
    name = where[-1].strip("-")
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {name}", "1"], [f"| {name}", "2"]]
    assert load.startswith("load average")

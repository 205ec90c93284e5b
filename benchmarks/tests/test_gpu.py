"""The program for the day that there is a GPU, rehearsed without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from programs import imported_modules

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/gpu", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )


def rehearse(results: Path, *parts: str) -> dict[str, Any]:
    ended = run(*parts, "--rehearse", "--results", results, timeout_s=900)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = {file.stem: json.loads(file.read_text()) for file in (results / "gpu").iterdir()}
    assert all(record["conditions"]["rehearsal"] for record in found.values())
    return found


def test_without_a_gpu_it_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    ended = run()
    assert ended.returncode == 1
    assert ended.stderr.startswith("no GPU: torch")
    assert "--rehearse" in ended.stderr


def test_an_unknown_part_is_refused_with_those_that_exist() -> None:
    ended = run("speed")
    assert ended.returncode == 2
    assert "no part speed; expected conformance, memory" in ended.stderr


def test_the_cast_is_rehearsed_beside_the_records_that_are_there(tmp_path: Path) -> None:
    conditions = {"rehearsal": True, "device": "a GPU of old", "command": "one of old"}
    there = {"conditions": conditions, "ok": True, "rows": []}
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/ops.json").write_text(json.dumps(there))
    parts = rehearse(tmp_path, "cast")
    assert parts["cast"]["compared"] > 60_000
    assert parts["cast"]["differing"] == 0
    assert parts["ops"] == there
    table = (tmp_path / "gpu.md").read_text()
    assert table.index("## cast") < table.index("- device: a GPU of old") < table.index("## ops")


def test_the_cost_of_orthogonalized_directions_is_rehearsed(tmp_path: Path) -> None:
    (row,) = rehearse(tmp_path, "orthogonal")["orthogonal"]["rows"]
    assert row["n_elements"] == 2 * 12 * 8 * 8
    # Two layers of 8 x 24, 8 x 8 and two of 8 x 32, each by 4 m^2 n + 2 m^3, five times.
    assert row["tflops"] * 1e12 == pytest.approx(2 * 5 * (4 * 64 * 96 + 4 * 2 * 512))
    assert "## orthogonal" in (tmp_path / "gpu.md").read_text()


@pytest.mark.root
@pytest.mark.slow
def test_hosts_are_rehearsed_and_measured_cells_stay(tmp_path: Path) -> None:
    record = rehearse(tmp_path, "hosts")["hosts"]
    (sweep,) = record["cells"].values()
    methods = sweep["results"]["100mbit"]
    assert methods.keys() == set(sweep["settings"]["methods"])
    assert set(sweep["replicas_equal"].values()) == {True}
    assert methods["local-8"]["steps"] % 8 == 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| 2 hosts, 100mbit | majority-auto-overlap |" in table
    traced = record["trace of a bucket"]
    assert {name: len(steps) for name, steps in traced["steps"].items()} == {"gloo": 3, "tcp": 3}
    assert "| a bucket between 2 hosts | Gloo, ms | own sockets, ms |" in table
    again = rehearse(tmp_path, "hosts")["hosts"]
    assert (again["cells"], again["trace of a bucket"]) == (record["cells"], traced)


def make_event(name: str, at_us: float, *, until_us: float | None = None) -> FunctionEvent:
    return FunctionEvent(
        id=0,
        name=name,
        thread=1,
        start_us=at_us,
        end_us=at_us + 1 if until_us is None else until_us,
        device_type=DeviceType.CPU,
    )


def test_a_wait_of_the_profiler_is_none_of_the_step() -> None:
    with imported_modules(ROOT / "benchmarks/gpu", "rank") as (rank,):
        events = [
            make_event("cudaDeviceSynchronize", 1),
            make_event(rank.STEP, 10, until_us=20),
            make_event("cuLaunchKernelEx", 11),
            make_event("cudaMemcpyAsync", 12),
            make_event("cudaEventSynchronize", 13),
            make_event("cudaDeviceSynchronize", 21),
        ]
        assert rank.count_events(events) == {"launches": 1, "copies": 1, "waits": 1}


CHECKED = "12 passed, 3 skipped in 4.00s\n========= ERROR SUMMARY: {} errors\n"


def judge(out: str, code: int = 0, *, is_checked: bool = True) -> dict[str, Any]:
    with imported_modules(ROOT / "benchmarks/gpu", "conditions", "checks") as (_, checks):
        record: dict[str, Any] = checks.judge_tests(out, code, is_checked=is_checked)
        return record


def test_the_checker_of_memory_speaks_after_the_tests() -> None:
    record = judge(CHECKED.format(0))
    assert record["ok"]
    assert (record["passed"], record["processes_checked"]) == (12, 1)


@pytest.mark.parametrize(
    ("out", "code"),
    [
        (CHECKED.format(0) + CHECKED.format(2), 0),
        (CHECKED.format(0), 9),
        ("12 passed in 4.00s", 0),  # nothing was checked
        ("no tests ran in 0.01s\n========= ERROR SUMMARY: 0 errors\n", 0),
    ],
)
def test_memory_is_not_called_checked(out: str, code: int) -> None:
    assert not judge(out, code)["ok"]


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    parts = rehearse(tmp_path)
    assert set(parts) == {
        *("conformance", "memory", "cast", "ranks"),
        *("ops", "steps", "orthogonal", "text"),
    }
    assert all(case["same_bits"] for case in parts["ranks"]["cases"])
    options = {case["options"] for case in parts["ranks"]["cases"]}
    assert options == {"", "overlap", "cautious", "weighted", "local"}
    assert len(parts["ops"]["rows"]) == 9
    assert "distlion.Lion" in {row["optimizer"] for row in parts["steps"]["rows"]}
    assert parts["conformance"]["passed"] >= 1
    methods = {row["method"] for row in parts["text"]["rows"]}
    assert methods == {
        "global-adamw",
        "majority-betas-90-95",
        "majority-cautious-betas-90-95",
    }

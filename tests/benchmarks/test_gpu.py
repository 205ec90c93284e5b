"""The program for the day that there is a GPU, rehearsed without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/gpu", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )


def rehearse(results: Path, *parts: str) -> dict[str, Any]:
    ended = run(*parts, "--rehearse", "--results", results, timeout_s=900)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found: dict[str, Any] = json.loads((results / "gpu.json").read_text())
    assert (results / "gpu.md").read_text().strip() == ended.stdout.strip()
    assert found["conditions"]["rehearsal"] is True
    return found["parts"]


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


def test_the_cast_is_rehearsed(tmp_path: Path) -> None:
    parts = rehearse(tmp_path, "cast")
    assert parts["cast"]["compared"] > 60_000
    assert parts["cast"]["differing"] == 0


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    parts = rehearse(tmp_path)
    assert list(parts) == ["conformance", "memory", "cast", "ranks", "ops", "steps", "text"]
    assert all(case["same_bits"] for case in parts["ranks"]["cases"])
    assert {case["overlap"] for case in parts["ranks"]["cases"]} == {False, True}
    assert len(parts["ops"]["rows"]) == 7
    assert "distlion.Lion" in {row["optimizer"] for row in parts["steps"]["rows"]}
    assert parts["conformance"]["passed"] >= 1
    assert parts["text"]["outcome"]

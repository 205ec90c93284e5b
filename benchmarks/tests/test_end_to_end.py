"""The program runs, and its Markdown says what its JSON says. No time is judged here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run it once with the smallest part and return the path of its JSON."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("a network lab needs root rights")
    if importlib.util.find_spec("pyroute2") is None:
        pytest.skip("the package pyroute2 is not installed")
    asked = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip("no network namespaces here")
    file: Path = tmp_path_factory.mktemp("results") / "end_to_end.json"
    command = [sys.executable, "benchmarks/end_to_end", "--quick", "--json", str(file)]
    ended = subprocess.run(
        [*command, "--parts", "device", "training", "pair", "exchange"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return file


@pytest.fixture(scope="module")
def result(results: Path) -> dict[str, Any]:
    return json.loads(results.read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
class TestAQuickRun:
    def test_targets_follow_from_the_records(self, result: dict[str, Any]) -> None:
        (row,) = (
            row for row in result["targets"] if row["name"] == "1gbit: majority-auto over ddp-fp32"
        )
        methods = result["training"]["results"]["1gbit"]
        measured = methods["majority-auto"]["speed_up"]["ddp-fp32"]["median"]
        assert row["measured"] == measured
        # The bounds are those of the large model.
        assert row["met"] is None

    def test_conditions_are_in_the_json(self, result: dict[str, Any]) -> None:
        assert all(result["conditions"][name] for name in ("command", "commit", "cpu", "torch"))

    def test_replicas_are_equal(self, result: dict[str, Any]) -> None:
        verdicts = result["training"]["replicas_equal"] | result["exchange"]["replicas_equal"]
        assert set(verdicts.values()) == {True}

    def test_markdown_has_every_target_and_method(
        self, results: Path, result: dict[str, Any]
    ) -> None:
        lines = results.with_suffix(".md").read_text().splitlines()
        for row in result["targets"]:
            (line,) = (line for line in lines if line.startswith(f"| {row['name']} |"))
            verdict = {True: "yes", False: "NO", None: "not judged"}[row["met"]]
            assert line.endswith(f"| {verdict} |")
        for name in result["device"]["quick"]["settings"]["methods"]:
            assert any(f" | {name} | " in line for line in lines)
        for name in result["training"]["settings"]["methods"]:
            assert any(line.startswith(f"| {name} |") for line in lines)

    def test_figure_is_drawn(self, results: Path) -> None:
        assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

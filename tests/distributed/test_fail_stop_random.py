"""Kills at random moments end cleanly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "random_kills.py"
KILLS = 3


def test_survivors_of_random_kills_end_cleanly_and_a_step_apart_at_most(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", str(KILLS), "--json"]
    found = subprocess.run(
        [*command, "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["summary"]["clean_ends"] == KILLS
    assert result["summary"]["victim_named_by_all"] == KILLS
    assert set(result["summary"]["steps_apart"]) <= {"0", "1"}
    assert json.loads((tmp_path / "random_kills.json").read_text()) == result
    assert f"{KILLS} of {KILLS} launches" in (tmp_path / "random_kills.md").read_text()

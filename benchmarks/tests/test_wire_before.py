"""The wire beside an earlier commit: turns, the page, and a short run with today's code twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from programs import imported_by_name


@pytest.fixture
def compared() -> Iterator[Any]:
    pytest.importorskip("pyroute2")
    pytest.importorskip("matplotlib")
    with imported_by_name("wire_before", "turns") as found:
        yield found


def test_commits_take_turns_and_each_is_first_in_turn(
    compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(python: str) -> dict[str, float]:
        asked.append(python)
        return {"a step, ms": float(len(asked))}

    monkeypatch.setitem(compared.turns.PARTS, "host", measure)
    said: list[str] = []
    ((name, values),) = compared.turns.take_turns("old", ("host",), 2, said.append)
    assert asked == ["old", sys.executable, sys.executable, "old"]
    assert name == "a step, ms"
    assert values == {"before": [1.0, 4.0], "now": [2.0, 3.0]}
    assert len(said) == 4


def test_the_page_has_medians_and_the_ratios_of_turns(compared: Any) -> None:
    record = {
        "command": "C",
        "before": "aa of D",
        "turns": 3,
        "conditions": {"commit": "bb", "date": "D", "cores": 2},
        "figures": {"a step, ms": {"before": [4.0, 2.0, 8.0], "now": [1.0, 2.0, 6.0]}},
    }
    page = compared.program.write_page(record)
    assert "| a step, ms | 4 | 2 | 0.75 (0.25 to 1.00) |" in page
    assert "Before: commit aa of D; now: commit bb." in page


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"elements": 1 << 16, "buckets": [1, 2]}, {"1", "2"}),
        (
            {
                "workload": "device",
                "sizes": {"layers": 2, "width": 64, "step_s": 0.01},
                "methods": ("none", "majority-auto", "majority-auto-overlap"),
            },
            {"none", "majority-auto", "majority-auto-overlap"},
        ),
    ],
    ids=["buckets", "device"],
)
def test_a_short_run_times_every_method(
    compared: Any, plan: dict[str, Any], names: set[str]
) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("a network lab needs root rights")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    shape = {"steps": 2, "blocks": 2}
    found = compared.turns.run_hosts(sys.executable, 2, "unlimited", plan | shape)
    assert set(found) == names
    assert all(wall_s > 0 and cpu_s > 0 for wall_s, cpu_s in found.values())

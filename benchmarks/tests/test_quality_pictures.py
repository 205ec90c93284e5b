"""Which differences the picture of the quality study shows, and the options of the program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from programs import imported_by_name

pytest.importorskip("matplotlib")
pytest.importorskip("scipy.stats")

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "quality"


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    """The modules of the program."""
    with imported_by_name("quality", "study_path", "settings", "pictures") as found:
        yield found


def make_claim(quality: Any, method: str, title: str, *, workers: int = 4) -> Any:
    setting = quality.settings.SETTINGS["text-small-1k"]
    cell = SimpleNamespace(method=method, workers=workers, setting=setting)
    ending = SimpleNamespace(records={1: {"parameters": 120_064}})
    difference = SimpleNamespace(title=title, method=ending)
    return SimpleNamespace(cell=cell, setting="text-small-1k", difference=difference)


def test_a_method_is_shown_with_its_own_decay_where_it_ran_with_it(quality: Any) -> None:
    claims = [
        make_claim(quality, "majority-betas-90-95", "plain"),
        make_claim(quality, "majority-betas-90-95-decay-4", "tuned"),
        make_claim(quality, "global-lion-betas-90-95-decay-025", "tuned", workers=0),
        make_claim(quality, "majority-betas-90-95", "of eight", workers=8),
        make_claim(quality, "one-bit-adam", "not shown"),
    ]
    lines = quality.pictures.list_lines(claims)
    found = {label: [each.title for each in line.values()] for label, line in lines.items() if line}
    assert found == {
        "one bit, betas (0.9, 0.95)": ["plain", "of eight"],
        "Lion on the mean gradient, betas (0.9, 0.95)": ["tuned"],
    }
    (_, _, below), _ = lines["one bit, betas (0.9, 0.95)"]
    assert below == "0.12 M\n1,000\n4"


@pytest.mark.parametrize("options", [["--lanes", "0", "--device", "cuda"], ["--lanes", "4"]])
def test_lanes_need_a_device_and_are_one_or_more(options: list[str]) -> None:
    command = [sys.executable, PROGRAM, "run", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "expected 1 or more, with --device cuda" in ended.stderr

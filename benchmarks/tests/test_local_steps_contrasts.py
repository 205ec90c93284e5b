"""Intervals of local steps are two-sided, 95 %, in the report and in the findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from local_study import imported_study

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"[+-]?\d\.\d{3}"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


def make_entry(task: str, losses: list[float], method: str = "") -> Any:
    """An entry whose seeds ended with these losses, equal in all blocks of text."""
    seeds = dict(enumerate(losses, start=1))
    return SimpleNamespace(
        method=method,
        cell=SimpleNamespace(setting=SimpleNamespace(task=task), is_long=False),
        curves={seed: [[32, loss, 0.5]] for seed, loss in seeds.items()},
        records={
            seed: {"test": {"units": {"values": [loss, loss]}}} for seed, loss in seeds.items()
        },
    )


@pytest.mark.parametrize("task", ["text", "images"])
def test_an_interval_over_three_seeds_is_two_sided(study: Any, task: str) -> None:
    losses = [1.0, 1.2, 1.3]
    reference = make_entry(task, [0.5, 0.5, 0.5])
    found = study.contrasts.find_contrast(make_entry(task, losses), reference)
    # The 97.5 % quantile of Student's t with 2 degrees of freedom, from a printed table.
    half = 4.303 * np.std(losses, ddof=1) / math.sqrt(3)
    assert found.high - found.low == pytest.approx(2 * half, rel=1e-3)
    assert found.mean == pytest.approx(np.mean(losses) - 0.5)
    assert found.verdict == "trails"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([1.0, 1.1, 1.2], "inconclusive"), ([0.2, 0.2, 0.21], "leads"), ([1.0], None)],
)
def test_a_verdict_needs_an_interval_without_0(
    study: Any, losses: list[float], verdict: str | None
) -> None:
    # With a one-sided quantile, 2.920, the first of these would trail.
    reference = make_entry("images", [0.9, 0.9, 0.9][: len(losses)])
    found = study.contrasts.find_contrast(make_entry("images", losses), reference)
    assert (found and found.verdict) == verdict


def test_the_simplest_vote_is_compared_at_equal_lengths(study: Any) -> None:
    entries = [
        make_entry("images", [1.0, 1.1, 1.2], method)
        for method in ("global-adamw", "local-8-scaled-plain", "diloco-8-plain")
    ]
    longer = make_entry("images", [1.0, 1.1, 1.2], "diloco-8-plain")
    longer.cell.is_long = True
    pairs = [
        (each.entry.method, each.entry.cell.is_long, each.reference.method)
        for each in study.contrasts.list_contrasts([*entries, longer])
    ]
    assert pairs == [
        ("local-8-scaled-plain", False, "global-adamw"),
        ("diloco-8-plain", False, "global-adamw"),
        ("diloco-8-plain", True, "global-adamw"),
        ("diloco-8-plain", False, "local-8-scaled-plain"),
    ]


@pytest.mark.slow
def test_the_page_is_what_the_program_writes(study: Any) -> None:
    results = ROOT / "benchmarks/results"
    blocks = list(study.page._lay_out(study.archive.Records(results / "local_steps")))
    page = study.page.render_markdown(blocks)
    assert (results / "local_steps.md").read_text("utf-8") == page


def test_intervals_of_the_findings_are_those_of_the_report() -> None:
    report = (ROOT / "benchmarks/results/local_steps.md").read_text("utf-8")
    shown = set()
    for low, high in re.findall(rf"\| ({NUMBER}) to ({NUMBER}) \|", report):
        shown |= {(float(low), float(high)), (-float(high), -float(low))}
    page = (ROOT / "studies/findings-in-numbers.md").read_text("utf-8")
    section = page.split("## Votes every H steps, in equal time")[1].split("\n## ")[0]
    told = re.findall(rf"\((?:interval\s+)?({NUMBER})\s+to\s+({NUMBER})\)", section)
    assert len(told) == 9
    assert {(float(low), float(high)) for low, high in told} <= shown

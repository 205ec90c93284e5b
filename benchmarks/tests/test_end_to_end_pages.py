"""Pages, figure and README's seconds are those of the JSON that was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import imported_by_name

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
ROWS = {
    "DDP with AdamW, fp32": "ddp-fp32",
    "PowerSGD with AdamW": "ddp-powersgd",
    "**votes, [the recipe](docs/recipe.md)**": "majority-auto",
}


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with imported_by_name("end_to_end", "tables", "overview") as found:
        yield found


@pytest.fixture(scope="module")
def sweep(benchmark: Any) -> dict[str, Any]:
    """The record of README's picture and table."""
    held = json.loads((RESULTS / "device.json").read_text())
    return held["device"][benchmark.overview.SWEEP]  # type: ignore[no-any-return]


def list_seconds(sweep: dict[str, Any], method: str) -> list[str]:
    rates = ("100mbit", "1gbit")
    return [f"{sweep['results'][rate][method]['seconds']['median']:.2f}" for rate in rates]


@pytest.mark.parametrize("name", ["device", "end_to_end"])
def test_a_page_is_what_the_program_writes(benchmark: Any, name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    page = (RESULTS / f"{name}.md").read_text("utf-8")
    assert benchmark.tables.write_markdown(result) == page


@pytest.mark.parametrize(("title", "method"), ROWS.items())
def test_seconds_of_the_readme_are_measured(sweep: dict[str, Any], title: str, method: str) -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| {title} |"))
    assert row.split(" | ")[1].split(", ") == list_seconds(sweep, method)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_picture_has_the_seconds_of_the_table(sweep: dict[str, Any], page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    (alternative,) = re.findall(r"!\[([^]]*)\]\([^)]*step_time\.png\)", text)
    methods = ("ddp-fp32", "majority-auto", "majority-auto-overlap")
    shown = [number for method in methods for number in list_seconds(sweep, method)]
    assert re.findall(r"\d\.\d\d", alternative) == shown


def test_the_rate_of_a_step_is_its_bytes_over_its_seconds(
    benchmark: Any, sweep: dict[str, Any]
) -> None:
    head, rows = benchmark.tables.tabulate_device(sweep)
    assert head[1] == "votes alone, Mbit/s"
    assert head[-1] == "in the step, Mbit/s"
    (row,) = (row for row in rows if row[0] == "1gbit" and row[2] == "ddp-fp32")
    ddp = sweep["results"]["1gbit"]["ddp-fp32"]
    mbit = 8e-6 * max(ddp["interface_bytes"]) / ddp["seconds"]["median"]
    assert float(row[-1]) == pytest.approx(mbit, rel=1e-2)
    assert float(row[1]) < mbit

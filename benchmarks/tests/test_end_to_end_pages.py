"""Pages, and the seconds that the docs say, are those of the JSON that was measured."""

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


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with imported_by_name("end_to_end", "tables", "overview") as found:
        yield found


@pytest.fixture(scope="module")
def sweep(benchmark: Any) -> dict[str, Any]:
    """The record of the picture of steps on an emulated accelerator."""
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_seconds_of_the_front_page_are_those_of_its_record(page: str) -> None:
    record = json.loads((RESULTS / "gpu" / "hosts_first_look.json").read_text())
    text = (ROOT / page).read_text("utf-8")
    (alternative,) = re.findall(r"!\[([^]]*)\]\([^)]*front\.png\)", text)
    names = ("none", "majority", "majority-overlap", "ddp-fp16", "ddp-fp32")
    measured = [record["seconds"][rate][name] for rate in ("10gbit", "1gbit") for name in names]
    assert [float(number) for number in re.findall(r"\d\.\d{3}", alternative)] == measured


def test_the_picture_has_the_seconds_of_its_record(sweep: dict[str, Any]) -> None:
    text = (ROOT / "docs/how-to/slow-link.md").read_text("utf-8")
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
    alone = sweep["traffic"]["1gbit"]["votes"]["rate_bit_per_s"] / 1e6
    assert float(row[1]) == pytest.approx(alone, rel=1e-2)

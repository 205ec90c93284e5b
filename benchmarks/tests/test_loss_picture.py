"""The picture of loss over hours is drawn from the records that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import imported_modules

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture(scope="module")
def picture() -> Iterator[Any]:
    with imported_modules(ROOT / "benchmarks", "loss_picture") as (found,):
        yield found


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads((RESULTS / "gpu/hosts_first_look.json").read_text())  # type: ignore[no-any-return]


def test_seconds_of_a_step_are_measured_or_those_of_its_bytes(picture: Any, record: Any) -> None:
    ddp, votes = picture.CURVES[1], picture.CURVES[2]
    assert picture.step_seconds(record, "1gbit", ddp) == record["seconds"]["1gbit"]["ddp-fp16"]
    assert picture.step_seconds(record, "10gbit", votes) == record["seconds"]["10gbit"]["majority"]
    # 124 million parameters, 3/4 of which travel, up and down.
    assert picture.step_seconds(record, "100mbit", votes) == pytest.approx(0.705 + 1.86)
    assert picture.step_seconds(record, "100mbit", ddp) == pytest.approx(0.705 + 29.76)


def test_a_curve_without_all_its_runs_is_not_drawn(picture: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 runs of majority-cautious"):
        picture.read_losses(tmp_path, "majority-cautious-betas-90-95")


def test_the_hours_that_the_front_page_says_are_those_of_the_picture(
    picture: Any, record: Any
) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    (alternative,) = re.findall(r"!\[([^]]*)\]\([^)]*loss_over_hours\.png\)", text)
    said = re.findall(
        r"after (\d+(?:\.\d)?)(?: hours, DDP in fp16 after| and) (\d+(?:\.\d)?)", alternative
    )
    hours = [
        [picture.STEPS * picture.step_seconds(record, rate, curve) / 3600 for curve in (votes, ddp)]
        for rate in picture.RATES
        for ddp, votes in [picture.CURVES[1:3]]
    ]
    assert len(said) == len(hours) == 3
    for each, computed in zip(said, hours, strict=True):
        assert [float(number) for number in each] == pytest.approx(computed, rel=0.06)
    ends = [
        min(picture.read_losses(RESULTS / "runs", curve.runs).values()) for curve in picture.CURVES
    ]
    assert all(abs(end - 1.5) < 0.03 for end in ends)

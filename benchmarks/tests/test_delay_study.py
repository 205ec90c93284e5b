"""The study of votes that are committed a step late: what it decides from records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import imported_by_name
from quality_records import Archive, best_at

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

MODULES = (
    "study_path",
    *("schedule", "variants", "feedback", "masked", "scoring", "delayed", "methods"),
    *("runs", "archive", "work", "cells", "plan", "evidence", "images", "text", "sources"),
    *("settings", "design", "differences", "answers", "pictures", "pages", "delay"),
)
PROTOCOL = Path(__file__).resolve().parents[2] / "studies" / "delay-protocol.md"


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    with imported_by_name("quality", *MODULES) as found:
        yield found


def decide(quality: Any, loss_when_late: float, n_parts: int = 6) -> str:
    archive = Archive(quality, best_at(("delayed-", loss_when_late)))
    archive.complete(quality.delay.DELAY_PARTS[:n_parts])
    answer: str = quality.delay.decide(quality.delay.list_outcomes(archive.find), "orthogonalized")
    return answer


def test_parts_are_those_of_the_protocol_in_its_order(quality: Any) -> None:
    listed = re.findall(r"^\| `(delay-[a-z0-9-]+)`", PROTOCOL.read_text(), re.M)
    assert listed == [part.name for part in quality.delay.DELAY_PARTS]


def test_late_votes_that_lose_nothing_in_any_cell_become_an_option(quality: Any) -> None:
    assert decide(quality, -0.001) == "yes"
    assert decide(quality, -0.001, n_parts=5) == "not yet"


def test_late_votes_that_lose_too_much_in_one_cell_do_not(quality: Any) -> None:
    assert decide(quality, 0.02, n_parts=1) == "no"


def test_late_votes_that_never_reach_the_target_win_no_time(quality: Any) -> None:
    assert decide(quality, 0.005, n_parts=1) == "no"


def test_form_that_has_failed_is_not_run_in_later_cells(quality: Any) -> None:
    archive = Archive(quality, best_at(("delayed-majority-cautious", 0.02)))
    archive.complete(quality.delay.DELAY_PARTS[:1])
    first, second, *_ = quality.delay.leave_out_failed(quality.delay.DELAY_PARTS, archive.find)
    assert [name for name in second.methods if "cautious" in name] == []
    assert any(name.startswith("delayed-majority-orthogonal") for name in second.methods)
    assert len(second.methods) == len(first.methods) == 2


def test_page_lists_no_cells_that_are_not_to_be_run(quality: Any) -> None:
    archive = Archive(quality, best_at(("delayed-", 0.02)))
    archive.complete(quality.delay.DELAY_PARTS[:1])
    page = quality.delay.render_markdown(list(quality.delay._lay_out(archive.find)))
    assert "| delay-text | 4 | 4 | 0 |" in page
    assert "delay-images" not in page and "Other cells are not run" in page


def test_late_step_takes_the_longer_one_of_computing_and_exchanging(quality: Any) -> None:
    archive = Archive(quality, best_at())
    archive.complete(quality.delay.DELAY_PARTS[:1])
    shares = quality.delay.list_outcomes(archive.find)[0].shares
    assert quality.delay.exchange_seconds(1e8) == pytest.approx(1.86)
    assert shares["100 Mbit/s"] == pytest.approx(1.86 / (0.7 + 1.86))
    assert shares["1 Gbit/s"] == pytest.approx(0.7 / (0.7 + 0.186))

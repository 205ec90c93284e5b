"""What works with torch's optimizers, with one that votes: the table of docs/conformance.md."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

import schedule_rows
import state_rows
import step_rows
from cluster import run_workers

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
ROWS = schedule_rows.ROWS | step_rows.ROWS | state_rows.ROWS


def run_rows(rank: int, world_size: int) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for title, function in ROWS.items():
        try:
            function(rank)
            found[title] = None
        except (Exception, pytest.fail.Exception):  # other rows go on
            found[title] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    return run_workers(run_rows, 2, timeout_s=120)


@pytest.mark.parametrize("title", ROWS)
def test_row_holds_on_every_rank(outcomes: list[dict[str, str | None]], title: str) -> None:
    for found in outcomes:
        assert found[title] is None, found[title]


def test_rows_of_the_page_are_the_tests() -> None:
    table = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    titles = [title for title, _ in table if title != "in torch" and not title.startswith("---")]
    assert titles == list(ROWS)

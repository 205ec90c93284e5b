"""What works with torch's optimizers, with one that votes: docs/reference/conformance.md."""

from __future__ import annotations

import functools
import re
import traceback
from pathlib import Path

import pytest

import schedule_rows
import state_rows
import step_rows
from cluster import run_workers
from tiers import in_tiers

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "conformance.md"
ROWS = schedule_rows.ROWS | step_rows.ROWS | state_rows.ROWS
# They import what takes seconds.
SLOW = [title for title in ROWS if "transformers" in title or "torch.compile" in title]


def run_rows(rank: int, world_size: int, titles: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for title in titles:
        try:
            ROWS[title](rank)
            found[title] = None
        except (Exception, pytest.fail.Exception):  # other rows go on
            found[title] = traceback.format_exc()
    return found


@functools.cache
def run_tier(is_slow: bool) -> list[dict[str, str | None]]:
    titles = [title for title in ROWS if (title in SLOW) == is_slow]
    return run_workers(run_rows, 2, titles, timeout_s=120)


@pytest.mark.parametrize("title", in_tiers(ROWS, lambda title: title not in SLOW))
def test_row_holds_on_every_rank(title: str) -> None:
    for found in run_tier(title in SLOW):
        assert found[title] is None, found[title]


def test_slow_rows_are_two() -> None:
    assert len(SLOW) == 2


def test_rows_of_the_page_are_the_tests() -> None:
    table = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    titles = [title for title, _ in table if title != "in torch" and not title.startswith("---")]
    assert titles == list(ROWS)

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from programs import BENCHMARKS, imported_modules


@pytest.fixture(scope="module")
def goals() -> Iterator[ModuleType]:
    with imported_modules(BENCHMARKS, "wire_goals") as (found,):
        yield found


def test_page_is_what_the_records_say(goals: ModuleType) -> None:
    records = {
        name: json.loads((goals.RESULTS / f"{name}.json").read_text()) for name in goals.RECORDS
    }
    assert goals.PAGE.read_text() == goals.write_page(records)


def test_a_bound_is_kept_from_its_side(goals: ModuleType) -> None:
    missed = goals.Goal("a bucket, ms", 0.5, 0.75, False, "bucket_cost", "fewer system calls")
    assert missed.is_met is False
    assert replace(missed, measured=0.5).is_met is True
    assert replace(missed, at_least=True).is_met is True
    assert replace(missed, at_least=True, measured=0.4).is_met is False
    assert replace(missed, measured=None).is_met is None


def test_missed_goal_says_what_is_left(goals: ModuleType) -> None:
    missed = goals.Goal("a bucket, ms", 0.5, 0.75, False, "bucket_cost", "fewer system calls")
    assert missed.write() == (
        "| a bucket, ms | <= 0.5 | 0.75 | **no** | [record](bucket_cost.json) "
        "| fewer system calls |"
    )
    assert "system calls" not in replace(missed, measured=0.4).write()
    assert "| open |" in replace(missed, measured=None).write()

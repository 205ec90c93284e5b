"""Every framework of the list sits the exam; the quick tier asks one for a row or two of it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from integrations.contestants import CONTESTANTS, Contestant
from integrations.exam import ROWS, Reports, Row, hold_sitting, plan_jobs

pytestmark = pytest.mark.distributed

QUICK = ("no all-reduce of gradients", "same bits as a plain loop")
QUICK_JOBS = ("straight",)
SAMPLE = "Trainer"
"""The one framework of the quick tier."""
PLAIN = Contestant("a plain loop", "torch", "integrations.plain", "")


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, Contestant | Row) else None


def sit_exam(contestant: Contestant, *, quick: bool) -> Reports:
    """Return what the ranks of a framework say: two workers in the quick tier, else three."""
    if quick:
        return hold_sitting(contestant, 2, QUICK_JOBS)
    rows = [row for row in ROWS if row.name not in contestant.lacks]
    names = tuple(name for name in plan_jobs("", 3) if any(name in row.jobs for row in rows))
    return hold_sitting(contestant, 3, names)


def mark(contestant: Contestant, row: Row, *, quick: bool) -> None:
    loop = replace(PLAIN, module=contestant.plain, plain=contestant.plain)
    reports, plain = (sit_exam(each, quick=quick) for each in (contestant, loop))
    row.check(reports, plain)


def cases() -> list[tuple[Contestant, Row]]:
    return [
        (contestant, row)
        for contestant in (PLAIN, *CONTESTANTS)
        for row in ROWS
        if row.name not in contestant.lacks
    ]


@pytest.fixture
def installed(contestant: Contestant) -> Contestant:
    try:
        distribution(contestant.distribution)
    except PackageNotFoundError:
        pytest.skip(f"{contestant.distribution} is not installed")
    return contestant


@pytest.mark.parametrize(
    ("contestant", "row"),
    [(each, row) for each, row in cases() if row.name in QUICK and each.name == SAMPLE],
    ids=name_of,
)
def test_framework_passes_the_short_exam(installed: Contestant, row: Row) -> None:
    mark(installed, row, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize(("contestant", "row"), cases(), ids=name_of)
def test_framework_passes(installed: Contestant, row: Row) -> None:
    mark(installed, row, quick=False)


def test_lacking_rows_are_rows_of_the_exam() -> None:
    names = {row.name for row in ROWS}
    assert {name for contestant in CONTESTANTS for name in contestant.lacks} <= names


@pytest.mark.slow
def test_jobs_that_are_compared_differ_from_each_other() -> None:
    reports = sit_exam(PLAIN, quick=False)
    jobs = ("straight", "accumulation", "clipping", "skipped")
    assert len({reports[job][0].params for job in jobs}) == len(jobs)

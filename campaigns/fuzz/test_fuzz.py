"""Random programs end as they must, and so do those that have found something once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.campaign import describe, play, run
from fuzz.found import FOUND
from fuzz.workers import Crew
from tiers import in_tiers

pytestmark = pytest.mark.distributed

QUICK_S = 4.0
# Those that planted bugs name, and every eighth.
KILLERS = ("no_sync within no_sync", "three workers' momenta for two")
QUICK = {*KILLERS, *list(FOUND)[::8]}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Start processes once for all programs, unless one of them ends them."""
    with Crew() as started:
        yield started


@pytest.mark.parametrize("name", in_tiers(FOUND, QUICK.__contains__))
def test_a_program_that_found_something_ends_as_it_must(crew: Crew, name: str) -> None:
    assert play(FOUND[name], crew).violations == []


def test_random_programs_end_as_they_must(crew: Crew) -> None:
    tally = run(range(100_000), crew, seconds=QUICK_S, report=lambda tally: None, shrinks=False)
    assert tally.programs
    assert not tally.failures, describe(tally, QUICK_S)

"""Short training runs end with the bits that they always had."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bits import ledger
from bits.cases import (
    ALL_OPTIONS,
    PATTERNS,
    REPRESENTATIVES,
    VIRTUAL,
    Case,
    is_recorded,
    list_cases,
    pick_quick_cases,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:the inner optimizer's state"),
]

RECORDED = [case for case in list_cases() if is_recorded(case)]
MACHINE_BOUND = [case for case in list_cases() if not is_recorded(case)]
QUICK = pick_quick_cases()
OTHERS = [case for case in RECORDED if case not in set(QUICK)]
BATCHES = [OTHERS[start : start + 150] for start in range(0, len(OTHERS), 150)]


def list_differences(cases: list[Case], **environment: str) -> list[str]:
    return ledger.compare(ledger.play(cases, environment=environment), ledger.read())


def test_a_sample_has_the_recorded_bits() -> None:
    assert {case.pattern for case in QUICK} == PATTERNS.keys() | {VIRTUAL}
    assert len({case.rule for case in QUICK}) >= len(REPRESENTATIVES)
    assert len({case.option for case in QUICK}) > len(ALL_OPTIONS) / 3
    assert list_differences(QUICK) == []


def test_every_case_is_recorded_and_nothing_else() -> None:
    assert list(ledger.read()) == [case.name for case in RECORDED]
    assert {case.option for case in list_cases()} == ALL_OPTIONS.keys()
    assert sorted(case.name for case in (*QUICK, *OTHERS)) == sorted(ledger.read())


def test_a_case_that_differs_is_named_with_what_differs() -> None:
    recorded = ledger.read()
    name, digests = next(iter(recorded.items()))
    moved = ledger.Digests("0", (*digests.states[:-1], "0"))
    assert ledger.compare({name: digests}, recorded) == []
    assert ledger.compare({name: moved}, recorded) == [f"{name}: parameters, state of 3"]
    assert ledger.compare({"new": moved}, recorded) == ["new: not recorded"]
    fewer = ledger.Digests(digests.params, digests.states[:-1])
    assert ledger.compare({name: fewer}, recorded) == [f"{name}: 3 states in place of 4"]
    two = {name: digests, "old": digests}
    assert ledger.compare({name: digests}, two, is_complete=True) == ["old: no such case"]


@pytest.mark.slow
@pytest.mark.parametrize("cases", BATCHES, ids=lambda cases: cases[0].name)
def test_all_other_cases_have_the_recorded_bits(cases: list[Case]) -> None:
    assert list_differences(cases) == []


@pytest.mark.slow
def test_plain_kernels_have_the_recorded_bits() -> None:
    real = [case for case in QUICK if case.pattern != VIRTUAL]
    assert list_differences(real, DISTLION_KERNELS="reference") == []


@pytest.mark.slow
def test_cases_without_a_record_have_the_same_bits_in_every_pattern() -> None:
    by_training = defaultdict(set)
    for name, digests in ledger.play(MACHINE_BOUND).items():
        rule, _, option = name.split(" / ")
        by_training[rule, option].add(digests)
    assert [training for training, found in by_training.items() if len(found) > 1] == []

"""Outer steps of real workers with local steps: the bits of the oracles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import distlion
from distlion.votes import Aggregation
from local_cases import check_cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RULES: list[Aggregation] = [
    distlion.ScaledVote(),
    distlion.ResidualVote(2),
    distlion.EstimateVote(),
]
OUTERS: list[dict[str, Any]] = [
    {"outer_lr": 0.7},
    {"outer_lr": 0.5, "outer_momentum": 0.9},
    {"outer_lr": 0.5, "outer_momentum": 0.9, "nesterov": True},
]


def check_product(outers: list[dict[str, Any]]) -> None:
    cases = [{"aggregation": rule, **outer} for rule, outer in itertools.product(RULES, outers)]
    plain = [
        {key.removeprefix("outer_"): value for key, value in case.items() if key != "aggregation"}
        for case in cases
    ]
    check_cases([case["aggregation"] for case in cases], cases, plain)


def test_every_outer_step_gives_the_bits_of_the_oracle() -> None:
    check_product(OUTERS)


def test_a_vote_in_each_step_with_a_plain_outer_step_gives_the_bits_of_the_oracle() -> None:
    check_product([{"every": 1}])

"""Outer steps of real workers with local steps: the bits of the oracles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import distlion
import matrix
from delta_oracle import DeltaRule
from distlion.votes import Aggregation
from local_cases import N_WORKERS, check_cases, check_runs
from local_runs import PlainRun, make_adamw
from oracle import F32, Group, OracleCluster

pytestmark = pytest.mark.distributed

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
SIGNS: list[Aggregation] = [
    distlion.MajorityVote(),
    distlion.TernaryVote(),
    distlion.FeedbackVote(2),
]
LION: dict[str, Any] = {"outer": "lion", "outer_lr": 1e-2, "outer_betas": (0.8, 0.95)}


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


class LionRun(PlainRun):
    """Workers whose outer step is Lion on the deltas, by the oracle of steps."""

    def __init__(self, rule: Aggregation) -> None:
        super().__init__(make_adamw, N_WORKERS, rule=DeltaRule("none"))
        flat = self.oracle.params
        self.oracle = LionOracle(flat, matrix.describe_for_oracle(rule))  # type: ignore[assignment]


class LionOracle:
    """Steps of Lion, asked as the oracle of votes on deltas is asked."""

    def __init__(self, params: list[F32], rule: Any) -> None:
        group = Group(params, rule, lr=LION["outer_lr"], betas=LION["outer_betas"])
        self._steps = OracleCluster([group], N_WORKERS)
        self.part = [*range(len(params))]

    @property
    def params(self) -> list[F32]:
        return self._steps.params

    def vote(self, deltas: Sequence[Sequence[F32 | None]]) -> None:
        self._steps.step(deltas)


def test_outer_lion_gives_the_bits_of_the_oracle() -> None:
    cases = [{"aggregation": rule, **LION} for rule in SIGNS]
    check_runs(cases, lambda number: LionRun(SIGNS[number]))

"""A pattern that passes on partial counts: same parameters, or a typed error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distlion
from cluster import run_workers
from distlion.errors import InvalidArgumentError
from replay import Case, GroupSpec, assert_equal_to_the_bit, play_all

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RULES = {"majority": distlion.MajorityVote(), "average": distlion.Average()}
CASES = [
    Case(
        name,
        (GroupSpec(rule, (1, 65, 513, 4097), lr=2e-3, weight_decay=0.1),),
        steps=3,
        seed=5,
        absent=True,
        exchange=distlion.AllReduce(),
    )
    for name, rule in RULES.items()
]


def test_votes_counted_in_parts_move_parameters_as_votes_counted_at_once() -> None:
    parts = [
        replace(case, name=f"{case.name}/parts", exchange=distlion.RecursiveDoubling())
        for case in CASES
    ]
    for outcomes in run_workers(play_all, 3, (*CASES, *parts)):
        for case in CASES:
            in_parts_too = outcomes[f"{case.name}/parts"]
            assert_equal_to_the_bit(outcomes[case.name], in_parts_too, case.name)


def refuse(rank: int, world_size: int) -> list[str]:
    """Make optimizers whose votes, or momenta, cannot be counted in parts."""
    told = []
    for options in (
        {"aggregation": distlion.FullPrecision()},
        {"aggregation": distlion.FeedbackVote()},
        {"momentum_sync": distlion.MomentumSync(every=2)},
    ):
        param = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(InvalidArgumentError) as refused:
            distlion.DistributedLion(
                [param],
                exchange=distlion.RecursiveDoubling(),
                **options,  # type: ignore[arg-type]
            )
        told.append(str(refused.value))
    return told


def test_recursive_doubling_refuses_floats_by_name_at_construction() -> None:
    for told in run_workers(refuse, 2):
        for text, name in zip(
            told, ("FullPrecision", "FeedbackVote", "momentum_sync"), strict=True
        ):
            assert "RecursiveDoubling()" in text
            assert name in text
            assert "AllReduce()" in text

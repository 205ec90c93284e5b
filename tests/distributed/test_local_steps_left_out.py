"""Parameters that are finite on no worker: votes leave them alone, and so do outer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
import matrix
from cluster import run_workers
from distlion.votes import Aggregation
from drawn import make_params
from local_runs import EVERY, SHAPES, STEPS, PlainRun, are_equal, copies, make, make_sgd, train
from tiers import in_tiers

pytestmark = pytest.mark.distributed

AT = EVERY + 1
"""Local steps before a parameter becomes NaN: a vote, and a step of the next period."""
RULES: list[Aggregation] = [
    distlion.ScaledVote(),
    distlion.ResidualVote(2),
    distlion.EstimateVote(),
]
Ended = tuple[list[Tensor], list[Tensor], list[Tensor], int]


def spoil(params: Sequence[Tensor]) -> None:
    with torch.no_grad():
        params[1][2] = torch.nan


def train_spoiled(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[Ended]:
    found = []
    for options in cases:
        params = make_params(SHAPES)
        optimizer = make(params, make_sgd, outer_lr=0.5, outer_momentum=0.9, **options)
        train(optimizer, params.values(), rank, 0, AT)
        spoil([*params.values()])
        train(optimizer, params.values(), rank, AT, STEPS)
        optimizer.verify_replicas()
        momenta = optimizer.outer_buffers
        found.append(
            (
                copies(optimizer.common_point),
                copies(params.values()),
                copies(momenta),
                optimizer.committed_step,
            )
        )
    return found


@pytest.mark.parametrize("nonfinite", in_tiers(["abstain", "skip"], lambda each: each == "abstain"))
def test_outer_momentum_leaves_alone_what_nobody_votes_on(nonfinite: str) -> None:
    more: list[dict[str, Any]] = [{}, {"nesterov": True}]
    cases = [(rule, {**each, "nonfinite": nonfinite}) for rule in RULES for each in more]
    ended = run_workers(train_spoiled, 2, [{"aggregation": rule, **each} for rule, each in cases])
    for number, (rule, settings) in enumerate(cases):
        described = matrix.describe_delta_rule(rule)
        expected = PlainRun(make_sgd, 2, rule=described, lr=0.5, momentum=0.9, **settings).do(AT)
        for params in expected.own:
            spoil(params)
        expected.do(STEPS - AT)
        for rank, rows in enumerate(ended):
            common, own, momenta, n_votes = rows[number]
            assert are_equal(common, expected.common), (rule, settings)
            assert are_equal(own, expected.own[rank]), (rule, settings)
            kept = [torch.from_numpy(each) for each in expected.oracle.buffers]
            assert are_equal([each.view(-1) for each in momenta], kept), (rule, settings)
            assert n_votes == expected.oracle.n_votes


def train_in_nodes(rank: int, world_size: int) -> list[bool]:
    params = make_params(SHAPES)
    optimizer = make(
        params,
        make_sgd,
        nodes=distlion.Nodes(ranks_per_node=2),
        outer_momentum=0.9,
        nonfinite="abstain",
    )
    train(optimizer, params.values(), rank, 0, AT)
    before = copies(optimizer.common_point)
    spoil([*params.values()])
    train(optimizer, params.values(), rank, AT, 2 * EVERY)
    optimizer.verify_replicas()
    return [
        not torch.equal(now, then) for now, then in zip(optimizer.common_point, before, strict=True)
    ]


def test_outer_momentum_of_nodes_leaves_alone_what_nobody_votes_on() -> None:
    """A node whose rank has no piece of the parameter learns it from the other."""
    assert run_workers(train_in_nodes, 4) == [[True, False, True]] * 4

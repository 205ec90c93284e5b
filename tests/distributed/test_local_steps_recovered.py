"""Votes on deltas that fail and can be repeated: the next delta covers both periods, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
import matrix
from cluster import run_workers
from distlion import errors, faults
from distlion.votes import Aggregation
from drawn import make_params
from failures import Caught, assert_raised
from local_accidents import AT_VOTE, BEFORE, N_WORKERS, OUTER, PLAIN_OUTER, list_tensors
from local_runs import EVERY, SHAPES, PlainRun, are_equal, catch, make, make_adamw, train
from tiers import in_tiers

pytestmark = pytest.mark.distributed

STEPS = BEFORE + 1 + 2 * EVERY
"""A vote that fails, one that covers its period too, and one more."""
RULES: list[Aggregation] = [
    distlion.ScaledVote(),
    distlion.ResidualVote(2),
    distlion.EstimateVote(),
    distlion.StochasticVote(),
]
Ended = tuple[Caught | None, int, bool, list[list[Tensor]], int]


def turn_nan(optimizer: distlion.LocalSteps) -> None:
    grad = optimizer.list_pairs()[1][1].grad
    assert grad is not None
    grad[2] = torch.nan


def change_delta(optimizer: distlion.LocalSteps) -> None:
    grad = optimizer.list_pairs()[1][1].grad
    assert grad is not None
    grad.add_(1)


def meet_and_go_on(
    rank: int, world_size: int, point: Any, action: Callable[..., None]
) -> list[Ended]:
    return [_meet_case(rank, point, action, rule) for rule in RULES]


def _meet_case(rank: int, point: Any, action: Callable[..., None], rule: Aggregation) -> Ended:
    params = make_params(SHAPES)
    optimizer = make(params, aggregation=rule, **OUTER)
    train(optimizer, params.values(), rank, 0, BEFORE)
    before = list_tensors(optimizer)
    fired = 0
    if rank == 1:
        fault = faults.arm(
            rank=1, step=AT_VOTE, point=point, action=lambda subject: action(optimizer)
        )
    found = catch(lambda: train(optimizer, params.values(), rank, BEFORE, BEFORE + 1))
    now = list_tensors(optimizer)
    is_whole = are_equal(now[0], before[0]) and are_equal(now[2], before[2])
    if rank == 1:
        fired = fault.fired
    faults.disarm_all()
    train(optimizer, params.values(), rank, BEFORE + 1, STEPS)
    optimizer.verify_replicas()
    return found, fired, is_whole, list_tensors(optimizer), optimizer.committed_step


def expect(rule: Aggregation) -> tuple[PlainRun, int]:
    """Return a run whose second vote is left out."""
    described = matrix.describe_delta_rule(rule)
    run = PlainRun(make_adamw, N_WORKERS, rule=described, **PLAIN_OUTER).do(BEFORE)
    run.every = 10**6
    run.do(1)
    run.every = EVERY
    return run.do(STEPS - run.done), run.oracle.n_votes


@pytest.mark.parametrize(
    ("point", "action", "kind"),
    in_tiers(
        [
            ("before_step", turn_nan, errors.NonFiniteError),
            ("after_encode", change_delta, errors.GradientChangedError),
        ],
        lambda case: case[0] == "after_encode",
    ),
)
def test_the_next_vote_covers_both_periods_to_the_bits_of_the_oracle(
    point: str, action: Callable[..., None], kind: type[Exception]
) -> None:
    ended = run_workers(meet_and_go_on, N_WORKERS, point, action)
    for number, case in enumerate(RULES):
        run, n_votes = expect(case)
        momenta = [torch.from_numpy(each) for each in run.oracle.buffers]
        for rank, rows in enumerate(ended):
            found, fired, is_whole, tensors, votes = rows[number]
            assert_raised(found, kind, "parameter 1 of group 0")
            assert bool(fired) == (rank == 1)
            assert is_whole, case
            for mine, wanted in zip(tensors, (run.common, run.own[rank], momenta), strict=True):
                pairs = zip(mine, wanted, strict=True)
                assert all(torch.equal(one.view(-1), other.view(-1)) for one, other in pairs), case
            assert votes == n_votes

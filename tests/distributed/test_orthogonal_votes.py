"""Votes on orthogonalized directions: real processes give the bits of ten lines of torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import distlion
import matrix
from cluster import run_workers
from distlion.kernels import orthogonalize
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    initial_values,
    play_all,
    play_oracle,
    worker_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

STEPS = 6
# 12 x 5, 12 x 12 and 12 x 100: tall, square and wide.
SIZES = (60, 144, 1200)
PLAIN = GroupSpec(distlion.MajorityVote(), (65, 3), lr=3e-3, cautious=True)
MAJORITY = GroupSpec(distlion.MajorityVote(), SIZES, lr=3e-3, weight_decay=0.1, rows=12)
RULES = {
    name: rule for name, rule in matrix.LISTED.items() if not isinstance(rule, distlion.MaskedVote)
}


def list_cases(world_size: int) -> list[Case]:
    """Every rule; every pattern; and each option that touches directions."""
    by_majority = Case("majority", (MAJORITY, PLAIN), STEPS, absent=True)
    weights = (2, 1, 3)[:world_size]
    return [
        by_majority,
        *(
            Case(f"rule {name}", (replace(MAJORITY, rule=rule), PLAIN), STEPS, absent=True)
            for name, rule in RULES.items()
        ),
        *(replace(by_majority, name=n, exchange=p) for n, p in matrix.PATTERNS.items()),
        replace(by_majority, name="overlap", absent=False, overlap=True, bucket_elements=150),
        replace(by_majority, name="weights", weights=weights, exchange=distlion.AllReduce()),
        replace(by_majority, name="cut precision", exp_avg_dtype="bfloat16"),
        Case("bfloat16", (replace(MAJORITY, dtype="bfloat16"),), STEPS),
    ]


def play_virtually(case: Case, world_size: int) -> list[np.ndarray]:
    """Play a case by virtual workers; return the parameters at the end."""
    values = iter(initial_values(case))
    groups = [
        {
            "params": [
                nn.Parameter(
                    torch.from_numpy(next(values)).view((spec.rows, -1) if spec.rows else n)
                )
                for n in spec.sizes
            ],
            "aggregation": spec.rule,
            "lr": spec.lr,
            "weight_decay": spec.weight_decay,
            "cautious": spec.cautious,
            "orthogonalize": spec.rows > 0,
        }
        for spec in case.groups
    ]
    cluster = distlion.VirtualCluster(groups, workers=world_size, seed=case.seed)
    params = [param for group in cluster.param_groups for param in group["params"]]
    for step in range(case.steps):
        for worker in range(world_size):
            for param, grad in zip(params, worker_grads(case, step, worker), strict=True):
                param.grad = None if grad is None else torch.from_numpy(grad).view(param.shape)
            cluster.collect(worker)
        cluster.step()
    return [param.detach().reshape(-1).numpy() for param in params]


@pytest.mark.parametrize("world_size", in_tiers([2, 3], lambda n: n == 3))
def test_votes_have_the_bits_of_a_plain_loop(world_size: int) -> None:
    cases = list_cases(world_size)
    outcomes = run_workers(play_all, world_size, cases, timeout_s=120)
    for case in cases:
        for rank, expected in enumerate(play_oracle(case, world_size)):
            found = outcomes[rank][case.name]
            assert_equal_to_the_bit(found, expected, f"{case.name}, rank {rank}")


@pytest.mark.parametrize("name", in_tiers(RULES, lambda name: list(RULES).index(name) % 4 == 0))
def test_virtual_workers_have_the_bits_of_a_plain_loop(name: str) -> None:
    case = Case("virtual", (replace(MAJORITY, rule=RULES[name]), PLAIN), STEPS, absent=True)
    expected = play_oracle(case, 3)[0]
    found = Outcome(play_virtually(case, 3), [])
    assert_equal_to_the_bit(found, replace_momenta(expected), name)


def replace_momenta(outcome: Outcome) -> Outcome:
    return Outcome(outcome.params, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_worker_moves_by_the_sign_of_its_orthogonalized_direction(dtype: str) -> None:
    case = Case("alone", (replace(MAJORITY, dtype=dtype), replace(PLAIN, dtype=dtype)), STEPS)
    outcome = play_all(0, 1, [case])["alone"]
    assert_equal_to_the_bit(outcome, play_oracle(case, 1)[0], dtype)


def test_singular_values_end_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((40, 30), (30, 40), (3, 20, 50)):
        matrices = torch.randn(shape, generator=generator) * 1e-20
        values = torch.linalg.svdvals(orthogonalize(matrices))
        assert values.min() > 0.6
        assert values.max() < 1.25


def test_a_matrix_of_zeros_stays_one_and_a_spoiled_one_is_not_finite() -> None:
    zeros = torch.zeros(3, 4)
    assert torch.equal(orthogonalize(zeros), zeros)
    for spoiled in (float("inf"), float("nan")):
        zeros[1, 2] = spoiled
        assert orthogonalize(zeros).isnan().all()
    assert orthogonalize(torch.full((3, 4), 3e38)).isfinite().all()

"""Different ways to the same bits: rules, patterns, buckets, world sizes that must agree."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import distlion
import matrix
from cluster import run_workers
from distlion.votes import Aggregation
from oracle import bits_of
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    initial_values,
    play_all,
    set_grads,
    snapshot,
    worker_grads,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 5
RULES = {name: matrix.RULES[name] for name in ("majority-zero", *matrix.first_of_each_class())}


def base_case(rule: Aggregation, name: str) -> Case:
    groups = (
        GroupSpec(rule, (1, 65, 513, 4097), lr=2e-3, weight_decay=0.1),
        GroupSpec(rule, (64, 9001), lr=2e-3, weight_decay=0.1, dtype="bfloat16"),
    )
    return Case(name, groups, steps=STEPS, seed=5, absent=True, exchange=distlion.AllReduce())


def variants(base: Case) -> tuple[Case, ...]:
    return (
        base,
        *(
            replace(base, name=f"{base.name}/{name}", exchange=pattern)
            for name, pattern in matrix.PATTERNS.items()
            if all(matrix.carries(pattern, group.rule) for group in base.groups)
        ),
        replace(base, name=f"{base.name}/buckets", bucket_elements=512),
        replace(
            base,
            name=f"{base.name}/all-gather, buckets",
            exchange=distlion.AllGather(),
            bucket_elements=4096,
        ),
    )


BASES = {rule_name: base_case(rule, rule_name) for rule_name, rule in RULES.items()}
ONE_BIT = base_case(distlion.QuantizedVote(bits=1, step=0.7), "one-bit")


def rules_of(world_size: int) -> list[str]:
    return ["majority", "quantized-2"] if world_size == 5 else list(RULES)


@functools.cache
def outcomes_of(world_size: int) -> list[dict[str, Outcome]]:
    cases = [case for rule_name in rules_of(world_size) for case in variants(BASES[rule_name])] + [
        ONE_BIT
    ]
    return run_workers(play_all, world_size, tuple(cases), timeout_s=120, measured=False)


@pytest.mark.parametrize("variant", [*matrix.PATTERNS, "buckets", "all-gather, buckets"])
@pytest.mark.parametrize(
    ("world_size", "rule_name"),
    [(n, r) for n in (2, 3, 5) for r in rules_of(n)],
)
def test_pattern_and_buckets_change_no_bit(world_size: int, rule_name: str, variant: str) -> None:
    pattern = matrix.PATTERNS.get(variant)
    if pattern is not None and not matrix.carries(pattern, RULES[rule_name]):
        pytest.skip("it counts in parts")
    for rank, outcomes in enumerate(outcomes_of(world_size)):
        assert outcomes[rule_name].error is None, outcomes[rule_name].error
        assert_equal_to_the_bit(
            outcomes[f"{rule_name}/{variant}"], outcomes[rule_name], f"rank {rank}"
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_quantized_vote_of_one_bit_equals_majority_vote(world_size: int) -> None:
    for rank, outcomes in enumerate(outcomes_of(world_size)):
        assert outcomes["majority"].error is None, outcomes["majority"].error
        assert_equal_to_the_bit(outcomes["one-bit"], outcomes["majority"], f"rank {rank}")


def test_rules_do_not_all_agree() -> None:
    """Equality above means something only if these runs can differ at all."""
    outcomes = outcomes_of(3)[0]
    ends = {np.concatenate(outcomes[rule].params).tobytes() for rule in RULES}
    assert len(ends) == len(RULES)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_ranks_hold_equal_parameters(world_size: int) -> None:
    outcomes = outcomes_of(world_size)
    for name, first in outcomes[0].items():
        for other in outcomes[1:]:
            for ours, theirs in zip(first.params, other[name].params, strict=True):
                assert np.array_equal(bits_of(ours), bits_of(theirs)), name


@functools.cache
def lion_outcome() -> Outcome:
    """The rule plays no part.

    Lion makes a momentum at the first gradient, and here every parameter has one.
    """
    case = BASES["majority"]
    params = [
        torch.nn.Parameter(
            torch.from_numpy(v).to(getattr(torch, dtype)).reshape(() if v.size == 1 else -1)
        )
        for v, dtype in zip(initial_values(case), case.dtypes, strict=True)
    ]
    spec = case.groups[0]
    lion = distlion.Lion(params, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
    for step in range(case.steps):
        set_grads(lion, worker_grads(case, step, 0))
        lion.step()
    return snapshot(lion)


@pytest.mark.parametrize("rule_name", RULES)
def test_world_size_one_equals_lion(rule_name: str) -> None:
    assert_equal_to_the_bit(outcomes_of(1)[0][rule_name], lion_outcome(), rule_name)


def run_without_group(rank: int, world_size: int, case: Case) -> Outcome:
    return play_all(rank, world_size, [case])[case.name]


def test_without_a_process_group_the_optimizer_equals_lion() -> None:
    outcome = run_workers(run_without_group, 1, BASES["majority"], process_group=False)[0]
    assert_equal_to_the_bit(outcome, lion_outcome(), "no group")

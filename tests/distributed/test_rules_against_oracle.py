"""Every rule, in real processes, gives the bits that the numpy oracle computes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import replace

import pytest

import distlion
import matrix
from cluster import run_workers
from replay import Case, GroupSpec, Outcome, assert_equal_to_the_bit, play_all, play_oracle
from tiers import in_tiers

pytestmark = pytest.mark.distributed

RULES = matrix.RULES
# 5003 is a prime above 4096: a second, shorter block of a quantized vote. A parameter costs about a
# millisecond for each worker and step, and a bucket several: quantized votes share the sizes among
# the numbers of bits, a rule meets float32 and bfloat16 at different numbers of workers, and only
# the simple votes take all 30 steps at each of these.
SIZES = (1, 2, 63, 64, 65)
QUANTIZED_SIZES = ((1, 64, 5003), (63, 5003), (2, 65))
DTYPES = ("float32", "bfloat16")
STEPS, FEWER_STEPS = 30, 10
VOTES = ("majority", "majority-zero", "ternary", "average")


def rule_case(rule_name: str, world_size: int) -> Case:
    """Now and then a gradient is missing, on some or on all ranks."""
    rule = RULES[rule_name]
    group = GroupSpec(
        rule,
        QUANTIZED_SIZES[(rule.bits + world_size) % 3]
        if isinstance(rule, distlion.QuantizedVote)
        else SIZES,
        lr=3e-3,
        weight_decay=0.1,
        dtype=DTYPES[(list(RULES).index(rule_name) + world_size) % 2],
    )
    steps = STEPS if rule_name in VOTES or world_size == 2 else FEWER_STEPS
    return Case(rule_name, (group,), steps, absent=True, exchange=distlion.AllReduce())


def rules_of(world_size: int) -> list[str]:
    """Simple votes meet every number of workers; the others two and three, and some five."""
    if world_size in (2, 3):
        return list(RULES)
    return [*VOTES, *([] if world_size == 4 else ["quantized-4", "full"])]


MIXED_GROUPS = (
    GroupSpec(RULES["majority"], (65, 130), lr=3e-3, weight_decay=0.1),
    GroupSpec(RULES["average"], (64, 1), lr=1e-3, betas=(0.95, 0.98), weight_decay=0.5),
    GroupSpec(RULES["majority"], (700,), lr=7e-3, betas=(0.0, 0.0), dtype="bfloat16"),
    GroupSpec(RULES["quantized-4"], (4100, 3), lr=2e-3, betas=(0.5, 0.9)),
    GroupSpec(RULES["majority"], (127,), lr=1e-4, weight_decay=1.0),
    GroupSpec(RULES["ternary"], (2, 63), lr=5e-3, dtype="bfloat16"),
    GroupSpec(RULES["full-bf16"], (513,), lr=0.0, weight_decay=0.1),
)

CAUTIOUS_GROUPS = tuple(
    GroupSpec(rule, sizes, lr=3e-3, weight_decay=0.1, dtype=dtype, cautious=cautious)
    for rule, sizes, dtype, cautious in (
        (RULES["majority"], (65, 130), "float32", True),
        (RULES["majority"], (64, 3), "float32", False),
        (RULES["majority-zero"], (700,), "bfloat16", True),
        (RULES["ternary"], (2, 63), "bfloat16", True),
        (RULES["average"], (64, 1), "float32", True),
        (RULES["quantized-4"], (4100, 3), "float32", True),
        (RULES["quantized-8-linf-narrow"], (513,), "float32", True),
        (RULES["feedback-1"], (65, 513), "float32", True),
        (RULES["feedback-2"], (4100,), "bfloat16", True),
        (RULES["full"], (129,), "float32", True),
        (RULES["full-bf16"], (513,), "bfloat16", True),
    )
)

SPECIAL_CASES = {
    case.name: case
    for case in (
        Case("groups-with-different-rules-and-settings", MIXED_GROUPS, seed=11, absent=True),
        Case(
            "many-small-buckets", MIXED_GROUPS, steps=10, seed=12, absent=True, bucket_elements=64
        ),
        Case(
            "all-gather",
            MIXED_GROUPS,
            steps=10,
            seed=13,
            absent=True,
            exchange=distlion.AllGather(),
        ),
        Case("every-worker-has-every-gradient", MIXED_GROUPS, steps=10, seed=14),
        Case("cautious-directions", CAUTIOUS_GROUPS, steps=15, seed=15, absent=True),
        Case(
            "stochastic-rounding",
            (
                GroupSpec(RULES["majority"], (1, 65, 1000), lr=1e-3, dtype="bfloat16"),
                GroupSpec(RULES["average"], (66,), lr=1e-3, weight_decay=0.1, dtype="bfloat16"),
                GroupSpec(RULES["average"], (66,), lr=1e-3, weight_decay=0.1),
            ),
            steps=20,
            seed=2**62 + 5,
            rounding="stochastic",
            absent=True,
        ),
        Case(
            "bfloat16-parameters-with-float32-momenta",
            (GroupSpec(RULES["quantized-8"], (65, 5003), lr=3e-3, dtype="bfloat16"),),
            steps=20,
            exp_avg_dtype="float32",
        ),
        Case(
            "float32-parameters-with-bfloat16-momenta",
            (GroupSpec(RULES["majority"], (65, 5003), lr=3e-3),),
            steps=20,
            exp_avg_dtype="bfloat16",
        ),
    )
}

LARGE = 1_000_003


def large_case(rule_name: str, dtype: str, steps: int) -> Case:
    group = GroupSpec(RULES[rule_name], (LARGE,), lr=3e-3, weight_decay=0.1, dtype=dtype)
    return Case(f"{rule_name}-{dtype}-{steps}", (group,), steps=steps)


class Both:
    """What workers and the oracle make of cases, on all cores at once: numpy takes minutes."""

    def __init__(self, oracles: Executor) -> None:
        self._oracles = oracles
        self._expected: dict[tuple[str, int], Future[list[Outcome]]] = {}
        self._outcomes: dict[tuple[str, int], list[Outcome]] = {}

    def has(self, name: str, world_size: int) -> bool:
        """Return whether a case was played."""
        return (name, world_size) in self._outcomes

    def play(self, cases: tuple[Case, ...], world_size: int) -> None:
        """Play cases in one launch."""
        for case in cases:
            future = self._oracles.submit(play_oracle, case, world_size)
            self._expected[case.name, world_size] = future
        ranks = run_workers(play_all, world_size, cases, timeout_s=300, measured=False)
        for case in cases:
            self._outcomes[case.name, world_size] = [rank[case.name] for rank in ranks]

    def check(self, name: str, world_size: int) -> None:
        """Compare one of the cases that were played."""
        outcomes = self._outcomes[name, world_size]
        expected = self._expected[name, world_size].result()
        assert len(outcomes) == len(expected) == world_size
        for rank, pair in enumerate(zip(outcomes, expected, strict=True)):
            assert_equal_to_the_bit(*pair, f"{name}, rank {rank}")


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("forkserver")
    ) as pool:
        yield Both(pool)


def special_case(name: str, world_size: int) -> Case:
    case = SPECIAL_CASES[name]
    return case if world_size == 3 else replace(case, steps=min(case.steps, FEWER_STEPS))


@pytest.mark.parametrize(
    ("world_size", "rule_name"),
    in_tiers([(n, r) for n in range(1, 6) for r in rules_of(n)], lambda case: case[0] == 3),
)
def test_rule_equals_the_oracle_to_the_bit_on_every_rank(
    world_size: int, rule_name: str, both: Both
) -> None:
    if not both.has(rule_name, world_size):
        both.play(tuple(rule_case(name, world_size) for name in rules_of(world_size)), world_size)
    both.check(rule_name, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("case_name", SPECIAL_CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mixed_run_equals_the_oracle_to_the_bit_on_every_rank(
    world_size: int, case_name: str, both: Both
) -> None:
    if not both.has(case_name, world_size):
        both.play(tuple(special_case(name, world_size) for name in SPECIAL_CASES), world_size)
    both.check(case_name, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule_name", "world_size", "dtype"),
    [
        ("majority", 2, "float32"),
        ("ternary", 2, "bfloat16"),
        ("average", 3, "bfloat16"),
        ("quantized-4", 3, "float32"),
    ],
)
def test_a_million_coordinates_equal_the_oracle_to_the_bit(
    rule_name: str, world_size: int, dtype: str, both: Both
) -> None:
    case = large_case(rule_name, dtype, steps=4)
    both.play((case,), world_size)
    both.check(case.name, world_size)

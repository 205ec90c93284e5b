"""Every rule, in real processes, gives the bits that the numpy oracle computes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import distlion
from cluster import run_workers
from oracle import Rule
from replay import Case, GroupSpec, Outcome, assert_equal_to_the_bit, play_all, play_oracle

pytestmark = pytest.mark.distributed

RULES = {
    "majority-coin": Rule("majority"),
    "majority-zero": Rule("majority", tie="zero"),
    "ternary": Rule("ternary"),
    "average": Rule("average"),
    **{
        f"quantized-{p}-l1": Rule("quantized", bits=p, step=1.1 * 2.0 ** (1 - p))
        for p in range(1, 9)
    },
    "quantized-3-linf": Rule("quantized", bits=3, norm="linf", step=0.3),
    "quantized-8-linf": Rule("quantized", bits=8, norm="linf", step=0.01),
    "full-float32": Rule("full"),
    "full-bfloat16": Rule("full", dtype="bfloat16"),
}
# 5003 is a prime above 4096: a second, shorter block of a quantized vote. A parameter costs about a
# millisecond for each worker and step, and a bucket several: quantized votes share the sizes among
# the numbers of bits, a rule meets float32 and bfloat16 at different numbers of workers, and only
# the simple votes take all 50 steps at each of these.
SIZES = (1, 2, 63, 64, 65)
QUANTIZED_SIZES = ((1, 64, 5003), (63, 5003), (2, 65))
DTYPES = ("float32", "bfloat16")
STEPS, FEWER_STEPS = 50, 15
VOTES = ("majority-coin", "majority-zero", "ternary", "average")


def rule_case(rule_name: str, world_size: int) -> Case:
    """Now and then a gradient is missing, on some or on all ranks."""
    rule = RULES[rule_name]
    group = GroupSpec(
        rule,
        QUANTIZED_SIZES[(rule.bits + world_size) % 3] if rule.kind == "quantized" else SIZES,
        lr=3e-3,
        weight_decay=0.1,
        dtype=DTYPES[(list(RULES).index(rule_name) + world_size) % 2],
    )
    steps = STEPS if rule_name in VOTES or world_size == 2 else FEWER_STEPS
    return Case(rule_name, (group,), steps, absent=True, exchange=distlion.Direct())


def rules_of(world_size: int) -> list[str]:
    """Simple votes meet every number of workers; the others two and three, and some five."""
    if world_size in (2, 3):
        return list(RULES)
    return [*VOTES, *([] if world_size == 4 else ["quantized-4-l1", "full-float32"])]


MIXED_GROUPS = (
    GroupSpec(RULES["majority-coin"], (65, 130), lr=3e-3, weight_decay=0.1),
    GroupSpec(RULES["average"], (64, 1), lr=1e-3, betas=(0.95, 0.98), weight_decay=0.5),
    GroupSpec(RULES["majority-coin"], (700,), lr=7e-3, betas=(0.0, 0.0), dtype="bfloat16"),
    GroupSpec(RULES["quantized-4-l1"], (4100, 3), lr=2e-3, betas=(0.5, 0.9)),
    GroupSpec(RULES["majority-coin"], (127,), lr=1e-4, weight_decay=1.0),
    GroupSpec(RULES["ternary"], (2, 63), lr=5e-3, dtype="bfloat16"),
    GroupSpec(RULES["full-bfloat16"], (513,), lr=0.0, weight_decay=0.1),
)

SPECIAL_CASES = {
    case.name: case
    for case in (
        Case("groups-with-different-rules-and-settings", MIXED_GROUPS, seed=11, absent=True),
        Case(
            "many-small-buckets", MIXED_GROUPS, steps=10, seed=12, absent=True, bucket_elements=64
        ),
        Case("gather", MIXED_GROUPS, steps=10, seed=13, absent=True, exchange=distlion.Gather()),
        Case("every-worker-has-every-gradient", MIXED_GROUPS, steps=10, seed=14),
        Case(
            "stochastic-rounding",
            (
                GroupSpec(RULES["majority-coin"], (1, 65, 1000), lr=1e-3, dtype="bfloat16"),
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
            (GroupSpec(RULES["quantized-8-l1"], (65, 5003), lr=3e-3, dtype="bfloat16"),),
            steps=20,
            exp_avg_dtype="float32",
        ),
        Case(
            "float32-parameters-with-bfloat16-momenta",
            (GroupSpec(RULES["majority-coin"], (65, 5003), lr=3e-3),),
            steps=20,
            exp_avg_dtype="bfloat16",
        ),
    )
}

LARGE = 1_000_003
LARGE_RULES = ("majority-coin", "ternary", "average", "quantized-4-l1")


def large_case(rule_name: str, dtype: str, steps: int) -> Case:
    group = GroupSpec(RULES[rule_name], (LARGE,), lr=3e-3, weight_decay=0.1, dtype=dtype)
    return Case(f"{rule_name}-{dtype}-{steps}", (group,), steps=steps)


@functools.cache
def rule_outcomes(world_size: int) -> list[dict[str, Outcome]]:
    """Play the cases of all rules in one launch."""
    cases = tuple(rule_case(rule_name, world_size) for rule_name in rules_of(world_size))
    return run_workers(play_all, world_size, cases, timeout_s=300, measured=False)


@functools.cache
def special_outcomes(world_size: int) -> list[dict[str, Outcome]]:
    cases = tuple(special_case(name, world_size) for name in SPECIAL_CASES)
    return run_workers(play_all, world_size, cases, timeout_s=300, measured=False)


def special_case(name: str, world_size: int) -> Case:
    case = SPECIAL_CASES[name]
    return case if world_size == 3 else replace(case, steps=min(case.steps, FEWER_STEPS))


def check(case: Case, world_size: int, outcomes: list[dict[str, Outcome]]) -> None:
    expected = play_oracle(case, world_size)
    for rank in range(world_size):
        assert_equal_to_the_bit(
            outcomes[rank][case.name], expected[rank], f"{case.name}, rank {rank}"
        )


@pytest.mark.parametrize(
    ("world_size", "rule_name"), [(n, r) for n in range(1, 6) for r in rules_of(n)]
)
def test_rule_equals_the_oracle_to_the_bit_on_every_rank(world_size: int, rule_name: str) -> None:
    check(rule_case(rule_name, world_size), world_size, rule_outcomes(world_size))


@pytest.mark.parametrize("case_name", SPECIAL_CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mixed_run_equals_the_oracle_to_the_bit_on_every_rank(
    world_size: int, case_name: str
) -> None:
    check(special_case(case_name, world_size), world_size, special_outcomes(world_size))


@pytest.mark.parametrize(
    ("rule_name", "world_size", "dtype"),
    [
        ("majority-coin", 2, "float32"),
        ("ternary", 2, "bfloat16"),
        ("average", 3, "bfloat16"),
        ("quantized-4-l1", 3, "float32"),
    ],
)
def test_a_million_coordinates_equal_the_oracle_to_the_bit(
    rule_name: str, world_size: int, dtype: str
) -> None:
    case = large_case(rule_name, dtype, steps=4)
    check(
        case, world_size, run_workers(play_all, world_size, (case,), timeout_s=120, measured=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule_name", LARGE_RULES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_million_coordinates_equal_the_oracle_after_fifty_steps(
    world_size: int, rule_name: str
) -> None:
    case = large_case(rule_name, "float32", steps=50)
    check(
        case, world_size, run_workers(play_all, world_size, (case,), timeout_s=300, measured=False)
    )

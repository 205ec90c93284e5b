"""Parts of the parameters that take turns to vote, in one process: the bits of the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import delta_oracle
import distlion
import matrix
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.local.outer_step import divide
from distlion.votes import Aggregation
from drawn import make_params
from local_runs import (
    SHAPES,
    PlainRun,
    are_equal,
    copies,
    make_adamw,
    make_sgd,
    train_virtually,
)

N_WORKERS, EVERY, STEPS = 3, 6, 20


def check(rule: Aggregation, parts: int, *, delay: int = 0, **outer: Any) -> None:
    """Compare virtual workers with plain torch and the oracle of votes, at the end."""
    params = make_params(SHAPES)
    given = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "nesterov"}
    cluster = distlion.VirtualLocalSteps(
        params.items(),
        make_adamw,
        workers=N_WORKERS,
        every=EVERY,
        delay=delay,
        parts=parts,
        aggregation=rule,
        **{given[name]: value for name, value in outer.items()},
    )
    own = train_virtually(cluster, params.values(), 0, STEPS)
    expected = PlainRun(
        make_adamw,
        N_WORKERS,
        rule=matrix.describe_delta_rule(rule),
        every=EVERY,
        delay=delay,
        parts=parts,
        **outer,
    ).do(STEPS)
    assert are_equal(cluster.common_point, expected.common)
    for mine, theirs in zip(own, expected.own, strict=True):
        assert are_equal(mine, theirs)
    assert cluster.committed_step == STEPS // (EVERY // parts)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rule", matrix.DELTA_RULES.values(), ids=matrix.DELTA_RULES)
def test_every_rule_votes_on_one_part_after_the_other(rule: Aggregation, parts: int) -> None:
    check(rule, parts)


@pytest.mark.parametrize(
    "outer",
    [
        {"lr": 0.7},
        {"lr": 0.5, "momentum": 0.9},
        {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    ],
)
def test_the_outer_momentum_of_a_part_rests_until_its_turn(outer: dict[str, Any]) -> None:
    check(distlion.ScaledVote(), 3, **outer)


@pytest.mark.parametrize(("parts", "delay"), [(2, 1), (2, 2), (3, 1)])
def test_a_part_takes_its_outcome_later_and_others_go_on(parts: int, delay: int) -> None:
    check(distlion.ResidualVote(), parts, delay=delay, momentum=0.5)


def make_three_parts(
    params: dict[str, torch.nn.Parameter], **options: Any
) -> distlion.VirtualLocalSteps:
    """Return two workers of SGD whose parameters vote in three parts, with outer momentum."""
    return distlion.VirtualLocalSteps(
        params.items(), make_sgd, workers=2, every=EVERY, parts=3, outer_momentum=0.9, **options
    )


def test_what_does_not_vote_is_not_touched() -> None:
    params = make_params(SHAPES)
    cluster = make_three_parts(params, aggregation=distlion.ResidualVote())
    for vote in range(6):
        before = copies(cluster.common_point)
        kept = [
            copies(cluster.outer_optimizer.state[param].values())
            for param in cluster.outer_optimizer.state
        ]
        train_virtually(cluster, params.values(), 2 * vote, 2 * vote + 2)
        after = [
            [*cluster.outer_optimizer.state[param].values()]
            for param in cluster.outer_optimizer.state
        ]
        for index in range(3):
            is_turn = index == vote % 3
            assert torch.equal(cluster.common_point[index], before[index]) != is_turn
            assert are_equal(kept[index], after[index]) != is_turn
            mine, others = (cluster.worker_params(n)[index] for n in range(2))
            assert torch.equal(mine, others) == is_turn


@pytest.mark.parametrize("delay", [0, 1])
def test_a_vote_out_of_turn_is_on_all_parts_that_took_steps(delay: int) -> None:
    rule, steps = distlion.ResidualVote(), 9
    params = make_params(SHAPES)
    cluster = distlion.VirtualLocalSteps(
        params.items(),
        make_sgd,
        workers=N_WORKERS,
        every=EVERY,
        parts=3,
        delay=delay,
        aggregation=rule,
        outer_momentum=0.5,
    )
    train_virtually(cluster, params.values(), 0, steps)
    cluster.vote()
    expected = PlainRun(
        make_sgd,
        N_WORKERS,
        rule=matrix.describe_delta_rule(rule),
        every=EVERY,
        parts=3,
        delay=delay,
        momentum=0.5,
    ).do(steps)
    if delay and steps % 2 == 0:
        expected.land()
    for _ in range(3):
        expected.vote()
    assert are_equal(cluster.common_point, expected.common)
    assert cluster.committed_step == steps // 2 + 3
    moved = copies(cluster.common_point)
    cluster.vote()
    assert cluster.committed_step == steps // 2 + 3
    assert are_equal(cluster.common_point, moved)


def test_a_part_that_has_just_voted_rests_in_a_vote_out_of_turn() -> None:
    params = make_params(SHAPES)
    cluster = make_three_parts(params, aggregation=distlion.ResidualVote())
    train_virtually(cluster, params.values(), 0, EVERY // 3)
    before = copies(cluster.common_point)
    residual = copies([next(iter(cluster.outer_optimizer.state.values()))["residual"]])
    cluster.vote()
    after = cluster.common_point
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, False]
    assert are_equal(residual, [next(iter(cluster.outer_optimizer.state.values()))["residual"]])


def test_a_part_whose_period_was_given_up_rests_in_a_vote_out_of_turn() -> None:
    params = make_params(SHAPES)
    cluster = make_three_parts(params, nonfinite="skip")
    train_virtually(cluster, params.values(), 0, EVERY + EVERY // 3 + 1)
    for worker in range(2):  # in the turn of the second part
        for index, param in enumerate(params.values()):
            param.grad = torch.full_like(param, torch.nan if index == 1 else 1.0)
        cluster.collect(worker)
    before = copies(cluster.common_point)
    cluster.step()
    assert are_equal(cluster.common_point, before)
    assert cluster.committed_step == 4
    cluster.vote()
    assert cluster.committed_step == 7
    after = cluster.common_point
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, False]


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(sizes, st.data())
def test_parts_are_those_of_the_oracle(sizes: list[int], data: st.DataObject) -> None:
    n_parts = data.draw(st.integers(1, len(sizes)))
    expected = delta_oracle.divide(sizes, n_parts)
    turns = divide(sizes, n_parts)
    assert [[at for at, own in enumerate(turns) if own == n] for n in range(n_parts)] == expected
    empty = [at for at in range(len(sizes) + 1) if data.draw(st.booleans())]
    longer = list(sizes)
    for at in reversed(empty):
        longer.insert(at, 0)
    kept = [turn for turn, size in zip(divide(longer, n_parts), longer, strict=True) if size]
    assert kept == turns


def test_parts_hold_about_as_much_each() -> None:
    assert divide([100] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert divide([1000, 1, 1, 1], 3) == [0, 1, 1, 2]
    assert divide([10, 10, 10, 1000], 2) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parts": 4}, InvalidArgumentError, "parts=4: expected a divisor of every=6"),
        ({"parts": 0}, InvalidArgumentError, "parts=0: expected a divisor"),
        ({"parts": 6}, InvalidArgumentError, "whole tensors, and 3 are trained"),
        ({"parts": 2.0}, UnsupportedTypeError, "parts=2.0: expected an integer"),
        ({"parts": 3, "delay": 2}, InvalidArgumentError, "a vote begins every 2 steps"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        distlion.VirtualLocalSteps(
            make_params(SHAPES).items(), make_sgd, workers=2, every=EVERY, **options
        )

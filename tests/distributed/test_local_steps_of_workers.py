"""Workers with local steps in real processes: the oracle's bits, and what befalls a vote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from cluster import run_workers
from distlion import faults
from distlion.votes import Aggregation
from drawn import make_params, set_grads
from failures import Caught, assert_raised
from local_cases import N_WORKERS, check_cases
from local_runs import (
    EVERY,
    SHAPES,
    STEPS,
    PlainRun,
    are_equal,
    copies,
    make,
    make_adamw,
    make_sgd,
    train,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

AT_VOTE = 1
"""The vote that faults meet."""
BEFORE = EVERY * (AT_VOTE + 1) - 1
"""Local steps before it."""

Options = dict[str, Any]
Ended = tuple[list[Tensor], list[Tensor]]


def test_every_rule_gives_the_bits_of_the_oracle() -> None:
    rules = [*matrix.DELTA_RULES.values()]
    check_cases(rules, [{"aggregation": rule} for rule in rules], [{}] * len(rules))


def test_every_pattern_gives_the_bits_of_the_oracle() -> None:
    cases = [
        (rule, pattern)
        for pattern in matrix.PATTERNS_OF_ALL_RULES.values()
        for rule in (distlion.ScaledVote(), distlion.ResidualVote(2), distlion.EstimateVote())
    ]
    check_cases(
        [rule for rule, _ in cases],
        [{"aggregation": rule, "exchange": pattern} for rule, pattern in cases],
        [{}] * len(cases),
    )


def train_in_nodes(rank: int, world_size: int, rule: Aggregation) -> Ended:
    params = make_params(SHAPES)
    optimizer = make(params, nodes=distlion.Nodes(ranks_per_node=2), aggregation=rule)
    train(optimizer, params.values(), rank, 0, STEPS - 1)
    optimizer.verify_replicas()
    return copies(optimizer.common_point), copies(params.values())


@pytest.mark.parametrize(
    "rule",
    in_tiers(
        [distlion.ScaledVote(), distlion.ResidualVote(2), distlion.EstimateVote()],
        lambda rule: rule == distlion.ResidualVote(2),
    ),
)
def test_the_ranks_of_a_node_vote_as_one(rule: Aggregation) -> None:
    ended = run_workers(train_in_nodes, 4, rule)
    first, _ = ended[0]
    begun = make_params(SHAPES).values()
    assert not any(map(torch.equal, first, begun))
    for common, own in ended:
        assert are_equal(common, first)
        assert are_equal(own, common)


def disagree(rank: int, world_size: int, options: Options) -> Caught | None:
    try:
        make(make_params(SHAPES), **(options if rank == 1 else {}))
    except Exception as error:
        return Caught(type(error).__name__, str(error), None, None, (), None, True)
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 5}, "a vote every"),
        ({"outer_lr": 0.5}, "outer_lr"),
        ({"outer_momentum": 0.9}, "outer_momentum"),
        ({"aggregation": distlion.ResidualVote()}, "aggregation"),
    ],
)
def test_workers_that_differ_in_settings_are_told(options: Options, words: str) -> None:
    for found in run_workers(disagree, N_WORKERS, options):
        assert_raised(found, distlion.errors.ConfigMismatchError, words)


def meet(
    rank: int, world_size: int, point: Any, action: Callable[..., None], options: Options
) -> tuple[Caught | None, bool, list[Tensor], list[Tensor], tuple[int, int]]:
    """Meet an accident of rank 1 in a vote, and go on where that is possible."""
    params = make_params(SHAPES)
    optimizer = make(params, **options)
    train(optimizer, params.values(), rank, 0, BEFORE)
    before = copies(optimizer.common_point)
    if rank == 1:
        faults.arm(rank=1, step=AT_VOTE, point=point, action=lambda what: action(optimizer, what))
    found: Caught | None = None
    try:
        train(optimizer, params.values(), rank, BEFORE, BEFORE + 1)
    except distlion.errors.StepError as error:
        found = Caught(
            type(error).__name__,
            str(error),
            error.rank,
            error.step,
            error.culprits,
            error.committed_step,
            error.is_recoverable,
        )
    unchanged = are_equal(optimizer.common_point, before)
    faults.disarm_all()
    if found is None or found.unchanged:  # recoverable, see above
        train(optimizer, params.values(), rank, BEFORE + 1, BEFORE + 1 + EVERY)
    counts = (optimizer.local_step, optimizer.committed_step)
    return found, unchanged, copies(optimizer.common_point), copies(params.values()), counts


def turn_nan(optimizer: distlion.LocalSteps, subject: Any) -> None:
    grad = optimizer.list_pairs()[1][1].grad
    assert grad is not None
    grad[2] = torch.nan


def turn_own_nan(optimizer: distlion.LocalSteps, subject: Any) -> None:
    with torch.no_grad():
        optimizer.list_pairs()[1][0][2] = torch.nan
    turn_nan(optimizer, subject)


def test_a_delta_that_is_not_finite_stops_all_and_all_go_on() -> None:
    ended = run_workers(meet, N_WORKERS, "before_step", turn_nan, {})
    first = ended[0][2]
    for found, unchanged, common, own, counts in ended:
        caught = assert_raised(found, distlion.errors.NonFiniteError, "parameter 1 of group 0")
        assert (caught.step, caught.culprits) == (AT_VOTE, (1,))
        assert unchanged
        assert are_equal(common, first)
        assert are_equal(own, common)
        assert counts == (BEFORE + 1 + EVERY, AT_VOTE + 1)


@pytest.mark.parametrize("nonfinite", ["skip", "abstain"])
def test_a_worker_that_is_not_finite_begins_anew_at_the_common_point(nonfinite: str) -> None:
    options = {"nonfinite": nonfinite}
    ended = run_workers(meet, N_WORKERS, "before_step", turn_own_nan, options)
    first = ended[0][2]
    for found, unchanged, common, own, counts in ended:
        assert found is None
        assert unchanged == (nonfinite == "skip")
        assert all(each.isfinite().all() for each in common)
        assert are_equal(common, first)
        assert are_equal(own, common)
        assert counts == (BEFORE + 1 + EVERY, AT_VOTE + 1 + (nonfinite == "abstain"))


def overflow(rank: int, world_size: int) -> tuple[tuple[int, int], float, list[Tensor]]:
    """Rank 1 alone sees an overflow under its GradScaler."""
    params = make_params(SHAPES)
    optimizer = make(params, make_sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for step in range(EVERY):
        set_grads(params.values(), rank, step)
        for param in params.values():
            assert param.grad is not None
            param.grad *= scaler.get_scale()
        if rank == 1 and step == 1:
            params["p1"].grad[0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
    return (
        (optimizer.local_step, optimizer.committed_step),
        scaler.get_scale(),
        copies(optimizer.common_point),
    )


def test_an_overflow_of_one_worker_keeps_none_from_the_vote() -> None:
    ended = run_workers(overflow, 2)
    assert [scale for _, scale, _ in ended] == [4.0, 2.0]
    for counts, _, common in ended:
        assert counts == (EVERY, 1)
        assert are_equal(common, ended[0][2])


def add_group(rank: int, world_size: int) -> list[Tensor]:
    params = make_params(SHAPES)
    optimizer = make(params, outer_momentum=0.5)
    train(optimizer, params.values(), rank, 0, EVERY + 1)
    params["more"] = nn.Parameter(torch.full((130,), float(rank)))
    optimizer.add_param_group({"params": [params["more"]]})
    assert torch.equal(params["more"], torch.zeros(130))
    train(optimizer, params.values(), rank, EVERY + 1, STEPS - 1)
    optimizer.verify_replicas()
    return copies(optimizer.common_point)


def test_parameters_that_are_added_are_voted_on() -> None:
    ended = run_workers(add_group, 2)
    assert len(ended[0]) == len(SHAPES) + 1
    assert ended[0][-1].any()
    assert are_equal(ended[0], ended[1])


def vote_out_of_turn(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], int]:
    params = make_params(SHAPES)
    optimizer = make(params)
    train(optimizer, params.values(), rank, 0, EVERY + 1)
    optimizer.vote()
    return copies(optimizer.common_point), copies(params.values()), optimizer.committed_step


def test_a_vote_out_of_turn_ends_a_period() -> None:
    expected = PlainRun(make_adamw, 2, rule=matrix.describe_delta_rule(distlion.ScaledVote()))
    expected.do(EVERY + 1).vote()
    for common, own, votes in run_workers(vote_out_of_turn, 2):
        assert are_equal(common, expected.common)
        assert are_equal(own, common)
        assert votes == 2


def drift(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The common point of rank 1 is damaged in memory, and repaired after the next vote."""
    params = make_params(SHAPES)
    optimizer = make(params, replicas=distlion.Replicas(check_every=1, on_mismatch="repair"))
    train(optimizer, params.values(), rank, 0, EVERY + 1)
    if rank == 1:
        optimizer.common_point[0][0] += 1
    train(optimizer, params.values(), rank, EVERY + 1, 2 * EVERY)
    return copies(optimizer.common_point), copies(params.values())


def repair_between_votes(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Rank 1 has begun its period at a common point that was damaged."""
    params = make_params(SHAPES)
    optimizer = make(params, replicas=distlion.Replicas(on_mismatch="repair"))
    train(optimizer, params.values(), rank, 0, EVERY)
    if rank == 1:
        optimizer.common_point[0][0] += 1
        with torch.no_grad():
            params["p0"].copy_(optimizer.common_point[0])
    optimizer.verify_replicas()
    train(optimizer, params.values(), rank, EVERY, STEPS)
    return copies(optimizer.common_point), copies(params.values())


def test_a_repair_between_votes_leaves_the_bits_of_the_oracle() -> None:
    rule = matrix.describe_delta_rule(distlion.ScaledVote())
    expected = PlainRun(make_adamw, 3, rule=rule).do(STEPS)
    for rank, (common, own) in enumerate(run_workers(repair_between_votes, 3)):
        assert are_equal(common, expected.common)
        assert are_equal(own, expected.own[rank])


def test_a_worker_whose_common_point_is_repaired_begins_there() -> None:
    ended = run_workers(drift, 3)
    for common, own in ended:
        assert are_equal(common, ended[0][0])
        assert are_equal(own, common)


SHORTENED_UNDER = (distlion.ScaledVote(), distlion.ResidualVote())


def make_embedding() -> nn.Embedding:
    values = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    return nn.Embedding(30, 8, _weight=values, max_norm=0.5)


def look_up(rank: int, world_size: int) -> list[list[Tensor]]:
    """Train an embedding whose forward pass shortens its rows."""
    ended = []
    for rule in SHORTENED_UNDER:
        embedding = make_embedding()
        inner = torch.optim.AdamW(embedding.parameters(), lr=0.1)
        optimizer = distlion.LocalSteps(inner, every=2, aggregation=rule)
        for step in range(8):
            embedding(torch.arange(10) + 5 * rank + step).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.vote()
        optimizer.verify_replicas()
        ended.append([embedding.weight.detach()])
    return ended


def test_rows_that_a_forward_pass_shortens_are_a_part_of_the_delta() -> None:
    first, second = run_workers(look_up, 2)
    for rule, one, other in zip(SHORTENED_UNDER, first, second, strict=True):
        assert are_equal(one, other)
        embedding = make_embedding()
        cluster = distlion.VirtualLocalSteps(
            embedding.parameters(),
            lambda params: torch.optim.AdamW(params, lr=0.1),
            workers=2,
            every=2,
            aggregation=rule,
        )
        for step in range(8):
            for worker in range(2):
                embedding(torch.arange(10) + 5 * worker + step).sum().backward()
                cluster.collect(worker)
            cluster.step()
        assert are_equal(one, [embedding.weight.detach()])

"""Virtual workers with local steps: the bits of plain torch and of the oracle of votes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
import matrix
from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion.votes import Aggregation
from drawn import make_params, set_grads
from local_runs import (
    EVERY,
    INNERS,
    SHAPES,
    STEPS,
    MakeInner,
    PlainRun,
    are_equal,
    make_adamw,
    make_sgd,
    train_virtually,
)

N_WORKERS = 3
OUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rate": {"lr": 0.7},
    "momentum": {"lr": 0.5, "momentum": 0.9},
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
}


def name_arguments(outer: dict[str, Any]) -> dict[str, Any]:
    """Say an outer step as the constructors do."""
    names = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "nesterov"}
    return {names[key]: value for key, value in outer.items()}


def check(
    make_inner: MakeInner,
    rule: Aggregation,
    outer: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    every: int = EVERY,
) -> None:
    params = make_params(SHAPES, dtype=dtype)
    cluster = distlion.VirtualLocalSteps(
        params.items(),
        make_inner,
        workers=N_WORKERS,
        every=every,
        aggregation=rule,
        **name_arguments(outer),
    )
    own = train_virtually(cluster, params.values(), 0, STEPS)
    expected = PlainRun(
        make_inner,
        N_WORKERS,
        rule=matrix.describe_delta_rule(rule),
        every=every,
        dtype=dtype,
        **outer,
    ).do(STEPS)
    assert are_equal(cluster.common_point, expected.common)
    for mine, theirs in zip(own, expected.own, strict=True):
        assert are_equal(mine, theirs)
    assert cluster.local_step == STEPS
    assert cluster.committed_step == STEPS // every


@pytest.mark.parametrize("rule", matrix.DELTA_RULES.values(), ids=matrix.DELTA_RULES)
def test_every_rule_gives_the_bits_of_the_oracle(rule: Aggregation) -> None:
    check(make_adamw, rule, {})


@pytest.mark.parametrize("make_inner", INNERS.values(), ids=INNERS)
def test_every_inner_optimizer_takes_its_own_steps(make_inner: MakeInner) -> None:
    check(make_inner, distlion.ScaledVote(), {})


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
@pytest.mark.parametrize("rule", [distlion.ScaledVote(), distlion.ResidualVote(2)])
def test_every_outer_step_gives_the_bits_of_the_oracle(
    rule: Aggregation, outer: dict[str, Any]
) -> None:
    check(make_sgd, rule, outer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_delta_begins_at_the_common_point_as_rounded(dtype: torch.dtype) -> None:
    check(make_sgd, distlion.ResidualVote(), {}, dtype)


def test_a_vote_in_each_step_is_a_period_of_one() -> None:
    check(make_adamw, distlion.ScaledVote(), {}, every=1)


def test_what_is_frozen_stays() -> None:
    params = make_params(SHAPES)
    params["p1"].requires_grad = False
    before = params["p1"].detach().clone()
    cluster = distlion.VirtualLocalSteps(params.items(), make_sgd, workers=2, every=1)
    for step in range(2):
        for worker in range(2):
            set_grads([params["p0"], params["p2"]], worker, step)
            cluster.collect(worker)
        cluster.step()
    assert torch.equal(params["p1"], before)
    assert len(cluster.common_point) == 2


def test_the_model_holds_the_parameters_of_the_worker_whose_turn_it_is() -> None:
    params = make_params({"p": 8})
    cluster = distlion.VirtualLocalSteps(params.items(), make_sgd, workers=2, every=4)
    set_grads(params.values(), 0, 0)
    cluster.collect(0)
    assert are_equal(params.values(), make_params({"p": 8}).values())
    with pytest.raises(InvalidArgumentError, match="worker 0 is collected; expected worker 1"):
        cluster.collect(0)
    with pytest.raises(InvalidArgumentError, match=r"step\(\) after 1 of 2 workers"):
        cluster.step()
    with pytest.raises(InvalidArgumentError, match=r"vote\(\) after 1 of 2 workers"):
        cluster.vote()
    set_grads(params.values(), 1, 0)
    cluster.collect(1)
    cluster.step()
    assert are_equal(params.values(), cluster.worker_params(0))
    assert not are_equal(params.values(), cluster.worker_params(1))


def test_a_delta_that_is_not_finite_is_refused() -> None:
    params = make_params({"p": 8})
    cluster = distlion.VirtualLocalSteps(params.items(), make_sgd, workers=2, every=1)
    for worker in range(2):
        params["p"].grad = torch.full((8,), torch.nan if worker == 0 else 1.0)
        cluster.collect(worker)
    with pytest.raises(NonFiniteError, match="p is not finite on worker 0"):
        cluster.step()


@pytest.mark.parametrize("nonfinite", ["abstain", "skip"])
@pytest.mark.parametrize("rule", [distlion.ScaledVote(), distlion.ResidualVote(2)])
def test_outer_momentum_leaves_alone_what_nobody_votes_on(
    rule: Aggregation, nonfinite: Any
) -> None:
    params = make_params(SHAPES)
    cluster = distlion.VirtualLocalSteps(
        params.items(),
        make_sgd,
        workers=N_WORKERS,
        every=EVERY,
        aggregation=rule,
        nonfinite=nonfinite,
        **name_arguments(OUTERS["momentum"]),
    )
    expected = PlainRun(
        make_sgd,
        N_WORKERS,
        rule=matrix.describe_delta_rule(rule),
        nonfinite=nonfinite,
        **OUTERS["momentum"],
    ).do(EVERY + 1)
    train_virtually(cluster, params.values(), 0, EVERY + 1)
    for worker in range(N_WORKERS):
        for mine in (cluster.worker_params(worker), expected.own[worker]):
            mine[1].detach()[2] = torch.nan
    [*params.values()][1].detach()[2] = torch.nan  # the model holds worker 0's
    own = train_virtually(cluster, params.values(), EVERY + 1, STEPS)
    expected.do(STEPS - EVERY - 1)
    assert are_equal(cluster.common_point, expected.common)
    for mine, theirs in zip(own, expected.own, strict=True):
        assert are_equal(mine, theirs)


def test_a_vote_without_a_step_since_the_last_moves_nothing() -> None:
    params = make_params(SHAPES)
    rule = distlion.ResidualVote()
    cluster = distlion.VirtualLocalSteps(
        params.items(), make_sgd, workers=2, every=EVERY, aggregation=rule
    )
    train_virtually(cluster, params.values(), 0, EVERY)
    before = [each.clone() for each in cluster.common_point]
    cluster.vote()
    assert cluster.committed_step == 1
    assert are_equal(cluster.common_point, before)
    for worker in range(2):
        assert are_equal(cluster.worker_params(worker), before)
    assert are_equal(params.values(), before)


def test_bits_count_scales_both_ways() -> None:
    params = make_params(SHAPES)
    cluster = distlion.VirtualLocalSteps(params.items(), make_sgd, workers=2, every=1)
    train_virtually(cluster, params.values(), 0, 2)
    n = sum(param.numel() for param in params.values())
    assert cluster.outer_optimizer.up_bits_per_parameter == (n + 3 * 32) / n
    assert cluster.outer_optimizer.down_bits_per_parameter == (n + 3 * 32) / n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1}, "nobody to vote with"),
        ({"every": 0}, "every=0: expected 1 or more"),
        ({"outer_lr": 0.0}, "outer_lr=0.0: expected a number above 0"),
        ({"outer_momentum": 1.0}, "expected it in \\[0, 1\\)"),
        ({"nesterov": True}, "outer_momentum is 0"),
        ({"aggregation": distlion.MajorityVote()}, "carry a step length"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    params = make_params({"p": 8})
    with pytest.raises(InvalidArgumentError, match=words):
        distlion.VirtualLocalSteps(params.items(), make_sgd, **{"workers": 2, **options})


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ([(torch.ones(2), "p")], UnsupportedTypeError, r"a tuple \(Tensor, str\)"),
        ([("p", torch.ones(2)), torch.ones(2)], InvalidArgumentError, "1 of the 2 .* no name"),
        ([{"params": [torch.ones(2)]}], UnsupportedTypeError, "expected a torch.Tensor"),
        ([], InvalidArgumentError, "params is empty"),
        (torch.ones(2), UnsupportedTypeError, r"a tensor of shape \(2,\)"),
    ],
)
def test_parameters_that_are_no_list_of_tensors_are_refused(
    entries: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        distlion.VirtualLocalSteps(entries, make_sgd, workers=2)


def test_an_inner_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="LBFGS evaluates a closure"):
        distlion.VirtualLocalSteps([nn.Parameter(torch.ones(3))], torch.optim.LBFGS, workers=2)


def test_weights_that_are_loaded_too_late_are_refused() -> None:
    model, other = (torch.nn.Linear(3, 2) for _ in range(2))
    cluster = distlion.VirtualLocalSteps(
        model.named_parameters(), lambda params: torch.optim.SGD(params, lr=0.1), workers=2
    )
    model.load_state_dict(other.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(InvalidArgumentError, match="weight was written to between two periods"):
        cluster.collect(0)
    assert model.weight.grad is not None
    assert torch.equal(cluster.worker_params(0)[0], cluster.common_point[0])


@pytest.mark.parametrize("call", ["collect", "vote", "change_workers"])
def test_weights_that_are_loaded_between_two_periods_are_refused(call: str) -> None:
    model, other = (torch.nn.Linear(3, 2) for _ in range(2))
    cluster = distlion.VirtualLocalSteps(
        model.named_parameters(), lambda params: torch.optim.SGD(params, lr=0.1), workers=2, every=2
    )
    for step in range(2):
        for worker in range(2):
            model(torch.full((1, 3), step + worker + 1.0)).sum().backward()
            cluster.collect(worker)
        cluster.step()
    model.load_state_dict(other.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    calls = {
        "collect": lambda: cluster.collect(0),
        "vote": cluster.vote,
        "change_workers": lambda: cluster.change_workers([0, 2]),
    }
    with pytest.raises(InvalidArgumentError, match="weight was written to between two periods"):
        calls[call]()

"""Local steps of one worker alone, and what the optimizer around another one must keep."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteError,
    UnsupportedTypeError,
)
from drawn import make_params, set_grads
from local_runs import (
    EVERY,
    INNERS,
    SHAPES,
    STEPS,
    are_equal,
    make_adamw,
    make_sgd,
    step_inner,
    train,
)

each_inner = pytest.mark.parametrize("make_inner", INNERS.values(), ids=INNERS)


def make(make_inner: Any = make_sgd, **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    params = make_params(SHAPES)
    return distlion.LocalSteps(make_inner(params.values()), **{"every": EVERY, **options}), params


@each_inner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_outer_step_of_one_worker_is_the_inner_optimizer(
    make_inner: Any, dtype: torch.dtype
) -> None:
    params = make_params(SHAPES, dtype=dtype)
    optimizer = distlion.LocalSteps(make_inner(params.values()), every=EVERY)
    train(optimizer, params.values(), 0, 0, STEPS)
    expected = make_params(SHAPES, dtype=dtype)
    inner = make_inner(expected.values())
    for step in range(STEPS):
        set_grads(expected.values(), 0, step)
        step_inner(inner)
    assert are_equal(params.values(), expected.values())
    assert (optimizer.local_step, optimizer.committed_step) == (STEPS, STEPS // EVERY)


def test_the_outer_momentum_of_one_worker_is_that_of_sgd() -> None:
    optimizer, params = make(outer_lr=0.5, outer_momentum=0.9, nesterov=True)
    train(optimizer, params.values(), 0, 0, STEPS)
    own, common = make_params(SHAPES), make_params(SHAPES)
    inner = make_sgd(own.values())
    outer = torch.optim.SGD(common.values(), lr=0.5, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        set_grads(own.values(), 0, step)
        inner.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for x, y in zip(common.values(), own.values(), strict=True):
                    x.grad = x - y
                outer.step()
                for x, y in zip(common.values(), own.values(), strict=True):
                    y.copy_(x)
    # Roundings of u = x - (x - d): a few units in the last place of weights around 1.
    for found, expected in zip(optimizer.common_point, common.values(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on", ["inner", "outside"])
def test_a_schedule_works_on_either_optimizer(on: str) -> None:
    optimizer, params = make(make_adamw)
    scheduled = optimizer if on == "outside" else optimizer.inner
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 2, gamma=0.5)
    expected = make_params(SHAPES)
    inner = make_adamw(expected.values())
    plain = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
    for step in range(STEPS):
        train(optimizer, params.values(), 0, step, step + 1)
        schedule.step()
        set_grads(expected.values(), 0, step)
        inner.step()
        plain.step()
    assert are_equal(params.values(), expected.values())


def test_groups_and_state_are_the_inner_optimizers() -> None:
    optimizer, params = make(make_adamw)
    train(optimizer, params.values(), 0, 0, 1)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.state[params["p0"]]["exp_avg"].any()
    optimizer.inner.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.param_groups is optimizer.inner.param_groups
    optimizer.zero_grad()
    assert all(param.grad is None for param in params.values())


def test_hooks_of_both_optimizers_run_once_a_step() -> None:
    optimizer, params = make()
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("outside"))
    optimizer.inner.register_step_post_hook(lambda *_: called.append("inner"))
    train(optimizer, params.values(), 0, 0, 2)
    assert called == ["inner", "outside"] * 2


def test_a_closure_is_handed_to_the_inner_optimizer() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = distlion.LocalSteps(torch.optim.LBFGS([weight], max_iter=5), every=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[0] == 4.0
    assert losses[-1] < 1e-6
    assert optimizer.committed_step == 2


@each_inner
def test_a_gradient_scaler_unscales_and_leaves_out_what_overflows(make_inner: Any) -> None:
    optimizer, params = make(make_inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler.scale(torch.ones(()))  # it has no scale before
    expected = make_params(SHAPES)
    inner = make_inner(expected.values())
    for step in range(STEPS):
        set_grads(params.values(), 0, step)
        for param in params.values():
            assert param.grad is not None
            param.grad *= scaler.get_scale()
        if step == 4:
            params["p1"].grad[0] = torch.inf  # type: ignore[index]
        else:
            set_grads(expected.values(), 0, step)
            step_inner(inner)
        scaler.step(optimizer)
        scaler.update()
    assert are_equal(params.values(), expected.values())
    assert scaler.get_scale() == 2.0
    assert optimizer.local_step == STEPS
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer.inner, "found_inf")


@pytest.mark.parametrize("which", ["outside", "inner", "fused inner"])
def test_what_was_unscaled_to_be_clipped_is_not_unscaled_again(which: str) -> None:
    optimizer, params = make(partial(torch.optim.SGD, lr=1e-2, fused=which == "fused inner"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    params["p1"].grad = torch.full((5,), 8.0)
    before = params["p1"].detach().clone()
    scaler.unscale_(optimizer.inner if "inner" in which else optimizer)
    nn.utils.clip_grad_norm_(params.values(), 1.0)
    scaler.step(optimizer)
    assert torch.allclose(before - params["p1"].detach(), torch.full((5,), 1e-2 / 5**0.5))


@each_inner
@pytest.mark.parametrize("outer", [{}, {"outer_momentum": 0.9}])
@pytest.mark.parametrize("at", [4, 6])
def test_a_state_goes_on_to_the_same_bits(make_inner: Any, outer: dict[str, Any], at: int) -> None:
    optimizer, params = make(make_inner, **outer)
    train(optimizer, params.values(), 0, 0, at)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [*params.values()]), file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    train(optimizer, params.values(), 0, at, STEPS)

    resumed, others = make(make_inner, **outer)
    with torch.no_grad():
        for param, weight in zip(others.values(), weights, strict=True):
            param.copy_(weight)
    resumed.load_state_dict(state)
    assert (resumed.local_step, resumed.committed_step) == (at, at // EVERY)
    train(resumed, others.values(), 0, at, STEPS)
    assert are_equal(params.values(), others.values())
    assert are_equal(optimizer.common_point, resumed.common_point)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    optimizer, params = make(make_adamw)
    train(optimizer, params.values(), 0, 0, 4)
    state = optimizer.state_dict()
    local = state["local_steps"]
    cases = {
        "votes every 4 steps, and this optimizer every 3": {**local, "every": 4},
        "expected a number of steps": {**local, "local_step": -1},
        "common was saved with the shapes": {**local, "common": local["common"][:2]},
        "outer_momentum was saved with": {**local, "outer_momentum": local["common"]},
        "malformed": 7,
    }
    groups, kept = optimizer.param_groups, optimizer.state
    for words, own in cases.items():
        with pytest.raises(CheckpointError, match=words):
            optimizer.load_state_dict({**state, "local_steps": own})
        assert optimizer.param_groups is groups
        assert optimizer.state is kept
        assert optimizer.local_step == 4
    with pytest.raises(CheckpointError, match="malformed"):
        optimizer.load_state_dict({**state, "param_groups": []})
    assert optimizer.param_groups is groups


def test_a_state_of_the_inner_optimizer_alone_loads() -> None:
    optimizer, params = make(make_adamw)
    train(optimizer, params.values(), 0, 0, 4)
    other, _ = make(make_adamw)
    other.load_state_dict(optimizer.inner.state_dict())
    assert torch.equal(
        *(each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (optimizer, other))
    )
    assert other.local_step == 0


def test_a_state_that_has_lost_its_key_is_refused_until_its_groups_say_nothing_of_it() -> None:
    optimizer, params = make(make_adamw)
    train(optimizer, params.values(), 0, 0, 4)
    state = optimizer.state_dict()
    del state["local_steps"]
    other, _ = make(make_adamw)
    with pytest.raises(CheckpointError, match="has lost its key 'local_steps'"):
        other.load_state_dict(state)
    assert not other.state
    for group in state["param_groups"]:
        del group["local_steps"]
    other.load_state_dict(state)
    assert other.state
    assert all("local_steps" not in group for group in other.param_groups)


def test_parameters_that_are_added_are_voted_on() -> None:
    optimizer, params = make(outer_momentum=0.5)
    train(optimizer, params.values(), 0, 0, 4)
    params["more"] = nn.Parameter(torch.linspace(-1, 1, 130))
    optimizer.add_param_group({"params": [params["more"]], "lr": 0.5})
    train(optimizer, params.values(), 0, 4, STEPS)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5]
    assert len(optimizer.common_point) == 4
    assert not torch.equal(optimizer.common_point[-1], torch.linspace(-1, 1, 130))
    with pytest.raises(InvalidArgumentError, match="once more"):
        optimizer.add_param_group({"params": [params["more"]]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "abstain"])
def test_a_worker_that_is_not_finite(nonfinite: Any) -> None:
    optimizer, params = make(nonfinite=nonfinite, every=1)
    before = [each.clone() for each in optimizer.common_point]
    set_grads(params.values(), 0, 0)
    params["p1"].grad[0] = torch.nan  # type: ignore[index]
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="parameter 1 of group 0"):
            optimizer.step()
        assert are_equal(optimizer.common_point, before)
        assert torch.isnan(params["p1"]).any()
        assert all(common.grad is None for _, common in optimizer.list_pairs())
        return
    optimizer.step()
    assert torch.equal(params["p1"], before[1])
    assert torch.equal(params["p0"], before[0]) == (nonfinite == "skip")


@pytest.mark.parametrize("nonfinite", ["skip", "abstain"])
def test_outer_momentum_leaves_alone_what_is_not_finite(nonfinite: Any) -> None:
    optimizer, params = make(nonfinite=nonfinite, outer_momentum=0.9)
    train(optimizer, params.values(), 0, 0, EVERY)
    buffers = optimizer.outer_buffers
    before = [each.clone() for each in (*optimizer.common_point, *buffers)]
    assert all(each.any() for each in before)
    with torch.no_grad():
        optimizer.inner.state[params["p1"]]["momentum_buffer"][0] = torch.nan
    train(optimizer, params.values(), 0, EVERY, 2 * EVERY)
    assert torch.equal(params["p1"], optimizer.common_point[1])
    now = [*optimizer.common_point, *buffers]
    are_same = [torch.equal(*pair) for pair in zip(now, before, strict=True)]
    assert are_same == [nonfinite == "skip", True, nonfinite == "skip"] * 2


def test_a_copy_is_refused() -> None:
    optimizer, _ = make()
    with pytest.raises(UnsupportedTypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    "make_inner",
    [
        distlion.DistributedLion,
        lambda params: params,
        lambda params: make()[0],
    ],
    ids=["votes", "no optimizer", "local steps"],
)
def test_an_inner_optimizer_that_does_not_step_alone_is_refused(make_inner: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="expected an optimizer of torch"):
        distlion.LocalSteps(make_inner([*make_params({"p": 4}).values()]))


@pytest.mark.parametrize("every", [1.5, True, "8"])
def test_every_is_an_integer(every: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="expected an integer"):
        make(every=every)


def test_a_parameter_is_trained_where_the_optimizer_can_vote_on_it() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(3, dtype=torch.float64))], lr=0.1)
    with pytest.raises(UnsupportedTypeError, match="float64"):
        distlion.LocalSteps(inner)

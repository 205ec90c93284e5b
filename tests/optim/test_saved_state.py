"""What one worker refuses to load, and what it keeps while refusing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distlion
from distlion.errors import CheckpointError, InvalidArgumentError


def make_optimizer() -> distlion.DistributedLion:
    param = torch.nn.Parameter(torch.ones(6))
    optimizer = distlion.DistributedLion([param], lr=0.1)
    param.grad = torch.arange(6.0)
    optimizer.step()
    return optimizer


def set_in_group(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][0].__setitem__(name, value)


SPOILT: dict[str, Callable[[dict[str, Any]], None]] = {
    "negative lr": set_in_group("lr", -1.0),
    "betas out of range": set_in_group("betas", (2.0, 3.0)),
    "no rule": set_in_group("aggregation", 5),
    "unknown rule": set_in_group("aggregation", "Dictator()"),
    "negative step": set_in_group("step", -1),
    "other shape": lambda state: state["state"][0].__setitem__("exp_avg", torch.zeros(7)),
    "no momentum": lambda state: state["state"].pop(0),
    "AdamW": lambda state: state["state"][0].__setitem__("exp_avg_sq", torch.zeros(6)),
    "another group": lambda state: state["param_groups"].append(state["param_groups"][0]),
    "no state": lambda state: state.pop("state"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil: str) -> None:
    optimizer = make_optimizer()
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    SPOILT[spoil](state)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


def test_groups_at_different_steps_are_refused_and_change_nothing() -> None:
    params = [torch.nn.Parameter(torch.ones(6)) for _ in range(2)]
    optimizer = distlion.DistributedLion([{"params": [param]} for param in params], lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][1]["step"] = 3
    with pytest.raises(CheckpointError, match=r"different steps: \[0, 3\]"):
        optimizer.load_state_dict(state)
    assert optimizer.committed_step == 0
    state["param_groups"][0]["step"] = 3
    optimizer.load_state_dict(state)
    assert optimizer.committed_step == 3


@pytest.mark.parametrize("kind", [distlion.Lion, distlion.DistributedLion])
@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf")])
def test_a_learning_rate_that_leaves_its_range_stops_the_step(
    kind: type[torch.optim.Optimizer], lr: float
) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([param])
    optimizer.param_groups[0]["lr"] = lr
    param.grad = torch.ones(3)
    with pytest.raises(InvalidArgumentError, match="lr"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))


def test_frozen_parameters_cost_no_momentum() -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = distlion.Lion([frozen, torch.nn.Parameter(torch.ones(2))])
    assert len(optimizer.state) == 1


def test_lion_gives_an_unfrozen_parameter_its_momentum() -> None:
    param = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = distlion.Lion([param], lr=0.5)
    param.requires_grad_()
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((3,), 0.5))


def make_cluster(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return distlion.VirtualCluster(params, workers=2, lr=0.1)


@pytest.mark.parametrize("is_prepended", [False, True])
@pytest.mark.parametrize("make", [distlion.Lion, distlion.DistributedLion, make_cluster])
def test_hooks_of_saving_find_the_live_groups_before_and_the_saved_form_after(
    make: Callable[..., torch.optim.Optimizer], is_prepended: bool
) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(6))])
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(expected)  # torch calls __setstate__, as copies do
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda own: seen.append(own.param_groups[0]["lr"]))

    def wrap(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state["param_groups"])
        return {"wrapped": state}

    optimizer.register_state_dict_post_hook(wrap, prepend=is_prepended)
    wrapped = optimizer.state_dict()
    assert list(wrapped) == ["wrapped"]
    assert seen == [expected["param_groups"][0]["lr"], expected["param_groups"]]
    assert all(type(rule) is str for group in seen[1] for rule in [group.get("aggregation", "")])
    assert torch.equal(wrapped["wrapped"]["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])


def make_local(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return distlion.LocalSteps(torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize(
    "make", [distlion.Lion, distlion.DistributedLion, make_cluster, make_local]
)
def test_hooks_before_loading_change_the_state_that_is_checked_and_run_once(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(6))])
    seen: list[list[str]] = []

    def unwrap(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(state))
        state["wrapped"]["param_groups"][0]["lr"] = 0.25
        return dict(state["wrapped"])

    def stamp(own: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        seen.append(["later"])
        state["param_groups"] = [
            {**group, "weight_decay": 0.125} for group in state["param_groups"]
        ]

    handles = [optimizer.register_load_state_dict_pre_hook(hook) for hook in (unwrap, stamp)]
    given = {"wrapped": copy.deepcopy(optimizer.state_dict())}
    optimizer.load_state_dict(given)
    assert seen == [["wrapped"], ["later"]]
    assert list(given) == ["wrapped"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    handles[0].remove()
    given = optimizer.state_dict()
    given["param_groups"][0]["weight_decay"] = 0.5
    optimizer.load_state_dict(given)
    assert given["param_groups"][0]["weight_decay"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.125
    assert seen == [["wrapped"], ["later"], ["later"]]


@pytest.mark.parametrize("make", [distlion.Lion, distlion.DistributedLion, make_cluster])
def test_a_hook_that_a_hook_after_loading_adds_stays(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(6))])
    seen: list[str] = []

    def add(own: torch.optim.Optimizer) -> None:
        own.register_load_state_dict_pre_hook(lambda own, state: seen.append("added"))

    handle = optimizer.register_load_state_dict_post_hook(add)
    optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["added"]


@pytest.mark.parametrize("make", [distlion.Lion, make_cluster])
def test_an_error_while_torch_loads_keeps_the_hooks(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(6))])
    seen: list[str] = []

    def fail(own: torch.optim.Optimizer) -> None:
        raise RuntimeError("no room")

    optimizer.register_load_state_dict_pre_hook(lambda own, state: seen.append("before"))
    handle = optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="no room"):
        optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "before"]


def test_lion_saves_a_group_with_a_rule_that_it_does_not_read() -> None:
    param, rule = torch.nn.Parameter(torch.ones(3)), distlion.MajorityVote()
    saved = distlion.Lion([{"params": [param], "aggregation": rule}]).state_dict()
    assert saved["param_groups"][0]["aggregation"] is rule

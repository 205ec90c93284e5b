"""States of other optimizers: those of a Lion are taken over, all others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import torch
from torch import nn

import distlion
from distlion.errors import CheckpointError, InvalidArgumentError

Params = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "Lion": lambda params: distlion.Lion(params, lr=0.1),
    "DistributedLion": lambda params: distlion.DistributedLion(params, lr=0.1),
    "VirtualCluster": lambda params: distlion.VirtualCluster(params, workers=2, lr=0.1),
}
OTHERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
if hasattr(torch.optim, "Muon"):  # not in the oldest PyTorch that is supported
    OTHERS["Muon"] = torch.optim.Muon
EVERY = pytest.mark.parametrize("kind", OPTIMIZERS)


def make_params() -> Params:
    return [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]


def step(optimizer: torch.optim.Optimizer, params: Params) -> None:
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    if isinstance(optimizer, distlion.VirtualCluster):
        optimizer.collect(0)
    optimizer.step()


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def refuse(kind: str, state: dict[str, Any], match: str) -> None:
    """Check that a state is refused, that nothing has changed, and that the next one is read."""
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    step(optimizer, params)
    before = copy_state(optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_dict(state)
    assert equal(copy_state(optimizer), before)
    optimizer.load_state_dict(before)
    step(optimizer, params)


@EVERY
@pytest.mark.parametrize("n_steps", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_optimizer_is_refused_whether_or_not_it_has_stepped(
    name: str, n_steps: int, kind: str
) -> None:
    params = make_params()
    other = OTHERS[name](params)
    for _ in range(n_steps):
        step(other, params)
    refuse(kind, copy_state(other), "not a Lion|Lion does not have")


@EVERY
@pytest.mark.parametrize("n_steps", [0, 1])
def test_a_state_of_a_lion_is_taken_over_and_leaves_no_switches_behind(
    n_steps: int, kind: str
) -> None:
    params = make_params()
    other = lion_pytorch.Lion(params, lr=0.25, betas=(0.8, 0.9), weight_decay=0.5)
    for _ in range(n_steps):
        step(other, params)
    state = copy_state(other)
    # As other implementations, schedulers and torch's own optimizers write them.
    state["param_groups"][0] |= {"initial_lr": 0.5, "maximize": False, "foreach": None}
    optimizer = OPTIMIZERS[kind](make_params())
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.25, (0.8, 0.9), 0.5)
    assert group["initial_lr"] == 0.5 and not {"maximize", "foreach"} & group.keys()
    for entry in optimizer.state.values():
        assert torch.all(entry["exp_avg"] == torch.tensor(0.5) * (1 - 0.9) * n_steps)


@EVERY
def test_keys_of_a_users_groups_load_where_the_groups_have_them(kind: str) -> None:
    params = make_params()
    lion = distlion.Lion([{"params": params, "name": "body"}], lr=0.25)
    optimizer = OPTIMIZERS[kind]([{"params": make_params(), "name": "head"}])  # type: ignore[list-item]
    optimizer.load_state_dict(lion.state_dict())
    assert optimizer.param_groups[0]["name"] == "body"
    refuse(kind, copy_state(lion), "group 0 holds 'name'")


@EVERY
def test_a_state_that_has_counted_steps_and_has_no_momentum_is_refused(kind: str) -> None:
    state = copy_state(lion_pytorch.Lion(make_params()))
    state["param_groups"][0]["step"] = 7
    refuse(kind, state, "step 7, and holds no momentum")


@EVERY
@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay"])
def test_groups_without_a_key_of_every_lion_are_refused(key: str, kind: str) -> None:
    state = copy_state(lion_pytorch.Lion(make_params()))
    del state["param_groups"][0][key]
    refuse(kind, state, f"not a Lion.*{key}")


@EVERY
@pytest.mark.parametrize("number", ["abc", None, -3, 2.5, 2**70, True])
def test_a_step_that_is_no_count_is_refused(number: Any, kind: str) -> None:
    state = copy_state(lion_pytorch.Lion(make_params()))
    state["param_groups"][0]["step"] = number
    refuse(kind, state, "step of group")


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "ids that cannot be looked up": (
        lambda state: state["param_groups"][0].update(params=[[0], [1]]),
        "cannot be an id",
    ),
    "an id twice": (
        lambda state: state["param_groups"][0].update(params=[0, 0]),
        "names parameter 0 twice",
    ),
    "an entry of no parameter": (
        lambda state: state["state"].update({9: {"exp_avg": torch.zeros(3, 2)}}),
        "an entry for 9, which no group names",
    ),
    "names that cannot be counted": (
        lambda state: state["param_groups"][0].update(param_names=7),
        "param_names",
    ),
    "an lr that cannot be read": (
        lambda state: state["param_groups"][0].update(lr=torch.zeros(2, device="meta")),
        "lr|malformed",
    ),
    "betas of no kind": (lambda state: state["param_groups"][0].update(betas={1, 2}), "betas"),
}


@EVERY
@pytest.mark.parametrize("name", UNFIT)
def test_a_malformed_state_is_one_typed_error_after_which_the_optimizer_lives(
    name: str, kind: str
) -> None:
    params = make_params()
    lion = lion_pytorch.Lion(params)
    step(lion, params)
    state = copy_state(lion)
    spoil, match = UNFIT[name]
    spoil(state)
    refuse(kind, state, match)


class Incomparable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("cannot be compared")


@pytest.mark.parametrize("kind", ["DistributedLion", "VirtualCluster"])
def test_what_nobody_thought_of_is_one_typed_error_too(kind: str) -> None:
    state = copy_state(OPTIMIZERS[kind](make_params()))
    state["param_groups"][0]["worker"] = Incomparable()
    refuse(kind, state, "malformed .ArithmeticError")


@pytest.mark.parametrize("kind", ["DistributedLion", "VirtualCluster"])
@pytest.mark.parametrize("number", ["abc", None, -3, 2.5, 2**70])
def test_a_step_that_is_no_count_is_refused_in_a_group_and_in_what_is_saved(
    number: Any, kind: str
) -> None:
    params: Any = [{"params": make_params(), "step": number}]
    with pytest.raises(InvalidArgumentError, match="step of"):
        OPTIMIZERS[kind](params)
    optimizer = OPTIMIZERS[kind](make_params())
    optimizer.param_groups[0]["step"] = number
    with pytest.raises(CheckpointError, match="step of group 0"):
        optimizer.state_dict()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_number_of_another_optimizer_is_none_of_lion_even_if_it_is_zero(kind: str) -> None:
    params = make_params()
    refuse(kind, torch.optim.Adam(params, eps=0.0).state_dict(), "'eps'")

"""Parameters that are taken out of the groups and added again keep their momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distlion
from distlion.errors import InvalidArgumentError


def take_step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[Any]:
    """Do a step with gradients of 1; return copies of the momenta."""
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [optimizer.state[param]["exp_avg"].clone() for param in params]


def test_a_parameter_that_is_added_again_keeps_its_momentum() -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    lion = distlion.Lion(params, lr=0.1)
    before = take_step(lion, params)
    lion.param_groups.clear()
    for param in params:
        lion.add_param_group({"params": [param]})
    assert all(before[i].any() for i in range(2))
    for param, momentum in zip(params, before, strict=True):
        assert torch.equal(lion.state[param]["exp_avg"], momentum)
    stayed = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    other = distlion.Lion(stayed, lr=0.1)
    take_step(other, stayed)
    assert all(map(torch.equal, take_step(lion, params), take_step(other, stayed)))


def test_a_parameter_that_is_added_again_in_another_dtype_begins_with_0() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    lion = distlion.Lion([param], lr=0.1)
    take_step(lion, [param])
    lion.param_groups.clear()
    param.grad, param.data = None, param.data.bfloat16()
    lion.add_param_group({"params": [param]})
    momentum = lion.state[param]["exp_avg"]
    assert momentum.dtype == torch.bfloat16 and not momentum.any()


@pytest.mark.parametrize("is_cast", [False, True])
def test_an_optimizer_that_refuses_a_known_parameter_keeps_its_momentum(is_cast: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    optimizer = distlion.DistributedLion(params, lr=0.1)
    before = take_step(optimizer, params)
    groups, frozen = list(optimizer.param_groups), torch.nn.Parameter(torch.ones(2))
    optimizer.param_groups.clear()
    whole = params[0].data
    if is_cast:
        params[0].grad, params[0].data = None, whole.bfloat16()
    with pytest.raises(InvalidArgumentError, match="replaced since"):
        optimizer.add_param_group({"params": [params[0], frozen]})
    params[0].grad, params[0].data = None, whole
    optimizer.param_groups[:] = groups
    assert set(optimizer.state) == set(params)
    found = [optimizer.state[param]["exp_avg"] for param in params]
    assert before[0].any() and all(map(torch.equal, found, before))
    after = take_step(optimizer, params)
    assert not any(map(torch.equal, after, before))

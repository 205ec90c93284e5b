"""Tables kept between steps are rebuilt after a user changes their inputs."""

from __future__ import annotations

from collections import UserList

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import InvalidArgumentError

LR, OTHER_LR = 0.5, 0.125


def make_params() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(3)
    return params


def test_a_parameter_that_was_moved_to_another_group_takes_its_rate() -> None:
    first, second = make_params()
    optimizer = distlion.Lion([{"params": [first]}, {"params": [second], "lr": OTHER_LR}], lr=LR)
    optimizer.step()
    assert second.tolist() == [-OTHER_LR] * 3
    groups = optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    optimizer.step()
    assert second.tolist() == [-OTHER_LR - LR] * 3


def test_a_momentum_that_was_taken_out_of_the_state_begins_anew() -> None:
    first, second = make_params()
    optimizer = distlion.Lion([first, second], lr=LR)
    optimizer.step()
    optimizer.state[first].clear()
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].tolist() == pytest.approx([0.05] * 3)
    assert first.tolist() == second.tolist() == [-2 * LR] * 3


@pytest.mark.parametrize("make", [distlion.Lion, distlion.DistributedLion])
def test_betas_that_change_in_place_count(make: type[torch.optim.Optimizer]) -> None:
    optimizer = make(make_params(), lr=LR)  # type: ignore[call-arg]
    betas = UserList([0.9, 0.5])
    optimizer.param_groups[0]["betas"] = betas
    optimizer.step()
    betas[1] = 0.0
    optimizer.step()
    for entry in optimizer.state.values():
        assert entry["exp_avg"].tolist() == [1.0] * 3


@pytest.mark.parametrize("make", [distlion.Lion, distlion.DistributedLion])
def test_a_foreign_key_in_place_of_another_is_refused(make: type[torch.optim.Optimizer]) -> None:
    optimizer = make(make_params(), lr=LR)  # type: ignore[call-arg]
    optimizer.param_groups[0]["name of mine"] = 1
    optimizer.step()
    del optimizer.param_groups[0]["name of mine"]
    optimizer.param_groups[0]["seed"] = 3
    with pytest.raises((InvalidArgumentError, distlion.errors.StepError), match="seed=3"):
        optimizer.step()


def test_a_step_without_groups_moves_nothing() -> None:
    first, second = make_params()
    optimizer = distlion.Lion([first, second], lr=LR)
    optimizer.param_groups.clear()
    optimizer.step()
    assert first.tolist() == second.tolist() == [0.0] * 3

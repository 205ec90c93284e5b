"""Copies and pickles: a Lion of one worker has them, an optimizer that votes refuses them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import distlion
from distlion.errors import ConcurrentCallError, UnsupportedTypeError
from drawn import set_grads


def save_whole(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": save_whole,
}
VOTING: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "DistributedLion": lambda params: distlion.DistributedLion(params, lr=1e-2),
    "lion_cub": lambda params: distlion.lion_cub(params, lr=1e-2),
    "VirtualCluster": lambda params: distlion.VirtualCluster(params, workers=2, lr=1e-2),
}


def make_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 70)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VOTING)
def test_an_optimizer_that_votes_refuses_to_be_copied_and_says_what_to_do(
    name: str, way: str
) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"state_dict\(\).*save_checkpoint"):
        WAYS[way](VOTING[name](make_params()))


def step(lion: Optimizer, params: list[nn.Parameter], number: int) -> list[Tensor]:
    set_grads(params, 0, number)
    lion.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("way", [name for name in WAYS if name != "copy"])
def test_a_copy_of_lion_with_its_parameters_goes_on_as_the_original(way: str) -> None:
    params = make_params()
    lion = distlion.Lion(params, lr=1e-2)
    step(lion, params, number=0)
    other_params, other = WAYS[way]((params, lion))
    moved = step(other, other_params, number=10)
    assert not torch.equal(moved[1], params[1])  # they share no memory
    assert all(map(torch.equal, moved, step(lion, params, number=10)))


def test_a_state_loaded_in_a_closure_leaves_the_step_under_way() -> None:
    params = make_params()
    lion = distlion.Lion(params, lr=1e-2)
    step(lion, params, number=0)
    saved = copy.deepcopy(lion.state_dict())
    step(lion, params, number=5)
    refused = []

    def closure() -> float:
        lion.load_state_dict(saved)
        set_grads(params, 0, 10)
        with pytest.raises(ConcurrentCallError):
            lion.step()
        refused.append(True)
        return 1.0

    expected = distlion.Lion(other := [nn.Parameter(each.detach().clone()) for each in params])
    expected.load_state_dict(saved)
    assert lion.step(closure) == 1.0 and refused
    assert all(map(torch.equal, params, step(expected, other, number=10)))
    step(lion, params, number=20)  # the lock is free again

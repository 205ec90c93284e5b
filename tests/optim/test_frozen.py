"""Parameters that are frozen while they have a gradient: one rule for all forms of Lion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion.errors import CheckpointError

FORMS = {
    "Lion": (distlion.Lion, {}),
    "DistributedLion": (distlion.DistributedLion, {}),
    "VirtualCluster": (distlion.VirtualCluster, {"workers": 1}),
}


def step_frozen(make: Any, **options: Any) -> list[Tensor]:
    """Do a step, freeze two parameters, one of them with its gradient, and do another step.

    Returns:
        How far the second step moved each: one that is trained, one frozen with its gradient, one
        frozen without, and one frozen from the start, which has a gradient.
    """
    params = [nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(4)]
    trained, kept, cleared, never = params
    never.requires_grad_(False)
    optimizer = make(params, lr=0.25, weight_decay=0.5, **options)
    before: list[Tensor] = []
    for step in range(2):
        if step == 1:
            kept.requires_grad_(False)
            cleared.requires_grad_(False)
        before = [each.detach().clone() for each in params]
        losses = [each.sum() * sign for each, sign in ((trained, 1), (cleared, 1), (kept, -1))]
        sum(loss for loss in losses if loss.requires_grad).backward()
        never.grad = torch.ones(9)
        if step == 1:
            kept.grad = -torch.ones(9)
        if isinstance(optimizer, distlion.VirtualCluster):
            optimizer.collect(0)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() - was for each, was in zip(params, before, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_frozen_with_a_gradient_moves_as_under_torch(form: str) -> None:
    make, options = FORMS[form]
    moved = step_frozen(make, **options)
    in_torch = step_frozen(torch.optim.SGD)
    assert [bool(each.any()) for each in moved] == [True, True, False, False]
    # Of what torch moves, only what was frozen from the start is without a momentum here.
    assert [bool(each.any()) for each in in_torch] == [True, True, False, True]
    expected = step_frozen(distlion.DistributedLion)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))


def step_in_group(rank: int, world_size: int, overlap: bool) -> list[Tensor]:
    return step_frozen(distlion.DistributedLion, overlap=overlap, bucket_elements=9)


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_frozen_with_a_gradient_moves_among_workers_too(overlap: bool) -> None:
    alone = step_frozen(distlion.DistributedLion)
    for moved in run_workers(step_in_group, 2, overlap):
        assert all(torch.equal(a, b) for a, b in zip(moved, alone, strict=True))


def make_half_frozen(make: Any, **options: Any) -> tuple[Any, nn.Parameter]:
    """Return an optimizer after a step, and its second parameter, which is frozen."""
    trained = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make([trained, frozen], lr=0.25, **options)
    trained.grad = torch.arange(3.0)
    if isinstance(optimizer, distlion.VirtualCluster):
        optimizer.collect(0)
    optimizer.step()
    return optimizer, frozen


def log_momentum(optimizer: Any, param: Tensor) -> None:
    """Look for a momentum as a logger does; ``state`` makes an empty entry of it."""
    assert optimizer.state[param].get("exp_avg") is None
    assert param in optimizer.state


@pytest.mark.parametrize("form", FORMS)
def test_a_look_at_a_frozen_parameter_leaves_a_state_that_loads(form: str) -> None:
    make, options = FORMS[form]
    optimizer, frozen = make_half_frozen(make, **options)
    log_momentum(optimizer, frozen)
    state = optimizer.state_dict()
    fresh, _ = make_half_frozen(make, **options)
    for each in (optimizer, fresh):
        each.load_state_dict(state)
        loaded = each.state_dict()["state"]
        assert torch.equal(loaded[0]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("form", FORMS)
def test_a_look_at_a_frozen_parameter_refuses_no_state(form: str) -> None:
    make, options = FORMS[form]
    state = make_half_frozen(make, **options)[0].state_dict()
    optimizer, frozen = make_half_frozen(make, **options)
    log_momentum(optimizer, frozen)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def load_after_a_look(rank: int, world_size: int) -> Tensor:
    optimizer, frozen = make_half_frozen(distlion.DistributedLion)
    if rank == 0:
        log_momentum(optimizer, frozen)
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.state_dict()["state"][0]["exp_avg"]


@pytest.mark.distributed
def test_a_look_on_one_worker_refuses_no_state_on_any() -> None:
    first, second = run_workers(load_after_a_look, 2)
    assert first.any() and torch.equal(first, second)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_entry_of_a_trained_parameter_is_refused(form: str) -> None:
    make, options = FORMS[form]
    optimizer, _ = make_half_frozen(make, **options)
    state = optimizer.state_dict()
    state["state"][0] = {}
    with pytest.raises(CheckpointError, match="no momentum 'exp_avg'"):
        optimizer.load_state_dict(state)

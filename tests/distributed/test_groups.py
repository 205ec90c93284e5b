"""What param groups may hold, and what becomes of them behind the optimizer's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
from cluster import run_workers
from distlion import errors
from failures import Caught, assert_all_raised, assert_raised, caught, make_optimizer, set_grads

pytestmark = pytest.mark.distributed


def make_pair() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((n,), 0.5)) for n in (70, 130)]


def swap(rank: int, world_size: int, ranks: tuple[int, ...], overlap: bool) -> list[Caught | None]:
    """Replace parameters after a step, as trainers do that shard a model late; then go on."""
    params = make_pair()
    optimizer = make_optimizer(params, overlap=overlap)
    set_grads(optimizer, 0, rank)
    optimizer.step()
    if rank in ranks:
        optimizer.param_groups[0]["params"] = [nn.Parameter(p.detach().clone()) for p in params]
    set_grads(optimizer, 1, rank)
    return [
        caught(None, optimizer.step),
        caught(None, optimizer.state_dict),
        caught(None, optimizer.step),
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_replaced_parameters_are_refused_by_name(overlap: bool) -> None:
    for step, state, again in run_workers(swap, 2, (0, 1), overlap):
        for found in (step, again):  # nothing has happened, so the optimizer may be called again
            assert_raised(
                found,
                errors.StepInputError,
                "replaced since this optimizer was made: params of group 0",
                "after the model is wrapped",
            )
        assert_raised(state, errors.CheckpointError, "replaced since this optimizer was made")


def test_parameters_replaced_on_one_rank_are_an_error_on_every_rank() -> None:
    outcomes = [found[0] for found in run_workers(swap, 3, (1,), False)]
    for found in outcomes:
        assert_raised(
            found, errors.ConfigMismatchError, "replaced since this optimizer was made: params of"
        )
        assert found.culprits == (1,)


def swap_alone() -> distlion.DistributedLion:
    optimizer = make_optimizer(make_pair())
    optimizer.param_groups[0]["params"] = make_pair()
    return optimizer


def test_replaced_parameters_of_a_single_worker_are_refused_too() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="replaced since"):
        swap_alone().step()


def test_replaced_parameters_of_virtual_workers_are_refused_too() -> None:
    cluster = distlion.VirtualCluster(make_pair(), workers=2)
    cluster.param_groups[0]["params"] = make_pair()
    with pytest.raises(errors.InvalidArgumentError, match="replaced since"):
        cluster.collect(0)


NAMES = ["first", "second"]
GROUPS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "names in the first only": ([{"param_names": NAMES}, {}], "group 1 has no names"),
    "names in the second only": ([{}, {"param_names": NAMES}], "group 1 has names"),
    "too few names": ([{"param_names": NAMES[:1]}], "1 names; expected a name for each of its 2"),
    "names that are none": ([{"param_names": [1, 2]}], "a list without names"),
    "maximize": ([{"maximize": True}], "maximize=True .* negate the loss"),
    "differentiable": ([{"differentiable": True}], "differentiable=True in a param group"),
    "amsgrad": ([{}, {"amsgrad": True}], "amsgrad=True"),
    "nesterov": ([{"nesterov": True}], "nesterov=True"),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("kind", ["DistributedLion", "Lion"])
def test_a_group_that_would_be_misread_is_refused_by_name(name: str, kind: str) -> None:
    groups, fragment = GROUPS[name]
    with pytest.raises(errors.InvalidArgumentError, match=fragment):
        getattr(distlion, kind)([group | {"params": make_pair()} for group in groups], lr=1e-2)


def name_mix(rank: int, world_size: int) -> Caught | None:
    first, second = make_pair()
    return caught(None, lambda: make_optimizer([("first", first), second]))


def test_names_of_some_parameters_of_a_group_are_refused_on_every_rank() -> None:
    outcomes = run_workers(name_mix, 2)
    assert_all_raised(outcomes, errors.InvalidArgumentError, "1 of the 2 parameters .* no name")


def test_a_later_group_without_names_beside_named_ones_changes_nothing() -> None:
    optimizer = make_optimizer([{"params": make_pair(), "param_names": NAMES}])
    with pytest.raises(errors.InvalidArgumentError, match="group 1 has no names"):
        optimizer.add_param_group({"params": make_pair()})
    assert [group["param_names"] for group in optimizer.param_groups] == [NAMES]


def test_names_of_a_group_are_taken_and_an_empty_group_needs_none() -> None:
    named = list(zip(NAMES, make_pair(), strict=True))
    groups = [{"params": make_pair(), "param_names": tuple(NAMES)}, {"params": []}]
    optimizer = make_optimizer([*groups, {"params": named, "maximize": False}])
    assert [group["param_names"] for group in optimizer.param_groups] == [NAMES, [], NAMES]
    unnamed = make_optimizer([{"params": make_pair()}, {"params": [], "param_names": []}])
    assert not any("param_names" in group for group in unnamed.param_groups)


def test_saved_groups_of_which_some_have_names_are_refused_and_change_nothing() -> None:
    optimizer = make_optimizer([{"params": [param]} for param in make_pair()])
    state = optimizer.state_dict()
    for names, fragment in (
        ([["first"], None], "group 0 has 'param_names' and group 1 has none"),
        ([["first"], NAMES], "2 names; expected a name for each of its 1"),
    ):
        saved = [
            group | ({} if given is None else {"param_names": given})
            for group, given in zip(state["param_groups"], names, strict=True)
        ]
        with pytest.raises(errors.CheckpointError, match=fragment):
            optimizer.load_state_dict({**state, "param_groups": saved})
        assert not any("param_names" in group for group in optimizer.param_groups)
    saved = [group | {"maximize": True} for group in state["param_groups"]]
    with pytest.raises(errors.CheckpointError, match="maximize=True"):
        optimizer.load_state_dict({**state, "param_groups": saved})

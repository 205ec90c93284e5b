"""Inner optimizers that orthogonalize: real workers have the bits of plain torch and of virtual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from cluster import run_workers
from distlion.errors import ConfigMismatchError, InvalidArgumentError, UnsupportedTypeError
from drawn import make_params
from failures import Caught, assert_raised
from local_cases import N_WORKERS, check_runs
from local_runs import (
    INNERS,
    PlainRun,
    are_equal,
    catch,
    copies,
    make,
    make_grouped_lion,
    make_muon_and_adamw,
    needs_muon,
    train,
    train_virtually,
)
from tiers import in_tiers

pytestmark = [pytest.mark.distributed, needs_muon]

NAMES = ("orthogonalizing lion", "muon and adamw")
MIXED: dict[str, int | tuple[int, ...]] = {
    "bias": 5,
    "first": (70, 33),
    "table": 4200,
    "second": (12, 40),
}
"""Matrices come first in the optimizers, and not here."""
EVERY, STEPS = 3, 10
CASES: dict[str, dict[str, Any]] = {
    "scaled": {"aggregation": distlion.ScaledVote()},
    "stochastic": {"aggregation": distlion.StochasticVote()},
    "residuals, momentum": {
        "aggregation": distlion.ResidualVote(2),
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "nesterov": True,
    },
    "estimates": {"aggregation": distlion.EstimateVote(), "every": 4},
}


def test_inner_steps_are_those_of_the_optimizers_alone() -> None:
    """The oracle steps each worker's optimizers by themselves."""
    rules = [distlion.ScaledVote(), distlion.EstimateVote(2)]
    runs = [(INNERS[name], rule) for name in NAMES for rule in rules]
    cases = [{"make_inner": make_inner, "aggregation": rule} for make_inner, rule in runs]

    def make_run(number: int) -> PlainRun:
        make_inner, rule = runs[number]
        return PlainRun(make_inner, N_WORKERS, rule=matrix.describe_delta_rule(rule))

    check_runs(cases, make_run)


def train_mixed(rank: int, world_size: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Train with each inner optimizer and each kind of vote."""
    ended = {}
    for inner in NAMES:
        for name, options in CASES.items():
            params = make_params(MIXED)
            optimizer = make(params, INNERS[inner], **options)
            train(optimizer, params.values(), rank, 0, STEPS)
            optimizer.verify_replicas()
            # Its common point is in the order of the groups.
            common = dict(optimizer.list_pairs())
            in_order = [common[param] for param in params.values()]
            ended[f"{inner}, {name}"] = copies(in_order), copies(params.values())
    return ended


@pytest.mark.parametrize("world_size", in_tiers([2, 3], lambda n: n == 3))
def test_real_workers_have_the_bits_of_virtual_ones(world_size: int) -> None:
    ended = run_workers(train_mixed, world_size)
    for inner in NAMES:
        for name, options in CASES.items():
            params = make_params(MIXED)
            cluster = distlion.VirtualLocalSteps(
                params.items(), INNERS[inner], workers=world_size, **{"every": EVERY, **options}
            )
            own = train_virtually(cluster, params.values(), 0, STEPS)
            for rank, found in enumerate(ended):
                common, mine = found[f"{inner}, {name}"]
                assert are_equal(common, cluster.common_point), (inner, name, rank)
                assert are_equal(mine, own[rank]), (inner, name, rank)


class Tower(nn.Module):
    """A small network whose parameters are of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(20, 12), nn.LayerNorm(12)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 20)


def group_by_kind(model: nn.Module, params: Any) -> distlion.Lion:
    """Make Lion over a worker's copies, with the groups that its model has."""
    own = dict(zip([name for name, _ in model.named_parameters()], params, strict=True))
    groups = [
        {**group, "params": [(name, own[name]) for name, _ in group["params"]]}
        for group in distlion.group_params(model, weight_decay=0.1)
    ]
    return distlion.Lion(groups, lr=1e-3)


def train_tower(rank: int, world_size: int) -> list[Tensor]:
    model = Tower()
    inner = distlion.Lion(distlion.group_params(model, weight_decay=0.1), lr=1e-3)
    optimizer = distlion.LocalSteps(inner, every=EVERY)
    train(optimizer, model.parameters(), rank, 0, STEPS)
    return copies(model.parameters())


def test_groups_by_kind_give_the_bits_of_virtual_workers_too() -> None:
    ended = run_workers(train_tower, 2)
    model = Tower()
    cluster = distlion.VirtualLocalSteps(
        model.named_parameters(),
        lambda params: group_by_kind(model, params),
        workers=2,
        every=EVERY,
    )
    assert [group["orthogonalize"] for group in cluster.inners[0].param_groups] == [
        *(True, False, False)
    ]
    own = train_virtually(cluster, model.parameters(), 0, STEPS)
    for mine, found in zip(own, ended, strict=True):
        assert are_equal(mine, found)


# Workers that disagree


def differ(rank: int, world_size: int) -> Caught | None:
    def make_inner(params: Any) -> Any:
        return make_muon_and_adamw(params)[:: -1 if rank == 1 else 1]

    return catch(lambda: make(make_params(MIXED), make_inner))


def test_workers_whose_optimizers_come_in_another_order_are_told() -> None:
    for found in run_workers(differ, 2):
        assert_raised(found, ConfigMismatchError, "parameter")


def add_a_group(rank: int, world_size: int) -> tuple[Caught | None, int]:
    optimizer = make(make_params(MIXED), make_muon_and_adamw)
    group = {"params": [nn.Parameter(torch.ones(3))]}
    found = catch(lambda: optimizer.add_param_group(group))
    optimizer.verify_replicas()
    return found, len(optimizer.param_groups)


def test_a_group_is_refused_on_all_workers() -> None:
    for found, n_groups in run_workers(add_a_group, 2):
        assert_raised(found, UnsupportedTypeError, "added to 2 inner optimizers")
        assert n_groups == 2


# What virtual workers refuse


def leave_one_out(params: Any) -> Any:
    return make_muon_and_adamw([*params][:-1])


def take_the_models(params: Any) -> Any:
    return make_grouped_lion(make_params(MIXED).values())


def change_their_order() -> Any:
    turns = iter((1, -1))
    return lambda params: make_muon_and_adamw(params)[:: next(turns)]


@pytest.mark.parametrize(
    ("make_inner", "words"),
    [
        (leave_one_out, "make_inner left second out of the optimizer"),
        (take_the_models, r"make_inner put a parameter of shape \(70, 33\)"),
        (change_their_order(), "in different orders"),
    ],
)
def test_virtual_workers_check_whose_parameters_they_have(make_inner: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        distlion.VirtualLocalSteps(make_params(MIXED).items(), make_inner, workers=2)


def test_virtual_workers_that_come_have_several_optimizers_too() -> None:
    params = make_params(MIXED)
    cluster = distlion.VirtualLocalSteps(params.items(), make_muon_and_adamw, workers=2, every=2)
    train_virtually(cluster, params.values(), 0, 3)
    cluster.change_workers([0, 1, 7])
    train_virtually(cluster, params.values(), 3, 6)
    assert cluster.committed_step == 3
    assert len(cluster.inners[2].param_groups) == 2
    assert all(cluster.inners[2].state[param] for param in cluster._workers[2].own)

"""One case of local steps: workers with inner optimizers that vote on how far they came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import distlion
import distlion_flower
from bits.cases import ALL_OPTIONS, ALL_RULES, MEMBERS, N_STEPS, Case, Option
from bits.training import (
    SETTINGS,
    SHAPES,
    Digests,
    Model,
    change_rates,
    digest,
    list_groups,
    list_kept,
    multiply_as,
    prepare_rank,
    set_grads,
    step_all,
    take_whole,
)

KEPT_INSIDE = ("exp_avg", "exp_avg_sq", "momentum_buffer")
KEPT_BY_RULES = ("estimate", "residual")

Inner = torch.optim.Optimizer | list[torch.optim.Optimizer]


def make_inner(named: Mapping[str, Any], option: Option) -> Inner:
    """Make a worker's inner optimizer, or several."""
    if option.inner == "lion":
        return distlion.Lion(list_groups(named, option))
    if option.inner == "two lions":
        return [distlion.Lion([group]) for group in list_groups(named, option)]
    if option.inner == "sgd":
        return torch.optim.SGD(named.values(), lr=1e-2, momentum=0.9)
    if option.inner == "adamw":
        return torch.optim.AdamW(named.values(), lr=3e-3)
    assert option.inner == "muon and adamw", option.inner
    matrices = [each for each in named.values() if each.ndim == 2]
    others = [each for each in named.values() if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]


def train_locally(rank: int, case: Case, mesh: DeviceMesh | None) -> tuple[str, str]:
    """Train one worker, or a shard of one; return digests of the common point and of its own."""
    option = ALL_OPTIONS[case.option]
    model, arguments = prepare_rank(rank, case, mesh)
    named = dict(model.named_parameters())
    optimizer = distlion.LocalSteps(
        make_inner(named, option), aggregation=ALL_RULES[case.rule].aggregation, **arguments
    )
    params = list(named.values())
    voter = rank // 2 if option.is_sharded else rank
    with multiply_as(option):
        step_all(optimizer, params, voter, option, steps=range(N_STEPS))
    if option.votes_last:
        optimizer.vote()
    return digest_local(optimizer, params, option)


def digest_local(
    optimizer: distlion.LocalSteps, params: Iterable[Tensor], option: Option
) -> tuple[str, str]:
    """Return digests of the common point, and of what a worker has of its own."""
    outer = optimizer.outer_optimizer
    common = {id(param): point for param, point in optimizer.list_pairs()}
    kept = list_kept(outer, list_params(outer), KEPT_BY_RULES)
    own = [*params, *list_kept(optimizer, list_params(optimizer), KEPT_INSIDE), *kept]
    return digest(take_whole(common[id(param)]) for param in params), digest(own)


def train_locally_virtual(case: Case) -> Digests:
    """Train all workers in this process."""
    option = ALL_OPTIONS[case.option]
    model, ids = Model(option.dtype), tuple(range(option.n_workers))
    cluster = distlion.VirtualLocalSteps(
        model.named_parameters(),
        lambda params: make_inner(dict(zip(_NAMES, params, strict=True)), option),
        workers=option.n_workers,
        weights=option.weights,
        aggregation=ALL_RULES[case.rule].aggregation,
        **{**SETTINGS, **option.arguments},
    )
    params = list(model.parameters())
    with multiply_as(option):
        for step in range(N_STEPS):
            change_rates(cluster.inners, step, option)
            for place, worker in enumerate(ids):
                set_grads(params, worker, step, option)
                cluster.collect(place)
            if option.newcomers and step in MEMBERS:
                ids = MEMBERS[step]
                cluster.change_workers(ids)
            cluster.step()
    if option.votes_last:
        cluster.vote()
    outer = cluster.outer_optimizer
    kept = list_kept(outer, list_params(outer), KEPT_BY_RULES)
    states = []
    for place, inner in enumerate(cluster.inners):
        inside = list_kept(inner, list_params(inner), KEPT_INSIDE)
        own = [*cluster.worker_params(place), *inside, *(each[place] for each in kept)]
        states.append(digest(own))
    return Digests(digest(cluster.common_point), tuple(states))


_NAMES = [name.replace(".", "_") for name in SHAPES]


def list_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters of an optimizer in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def train_clients(case: Case) -> Digests:
    """Train a server's parameters in rounds; of five clients asked, the last one is lost."""
    option = ALL_OPTIONS[case.option]
    model = Model(option.dtype)
    clients = distlion_flower.VirtualClients(
        model.named_parameters(),
        clients=9,
        seed=SETTINGS["seed"],
        rule=ALL_RULES[case.rule].aggregation,
        **option.arguments,
    )
    params = list(model.parameters())
    for number in range(N_STEPS):
        asked = [(5 * number + place) % 9 for place in range(5)]
        clients.begin(asked)
        for client in asked[:-1]:
            set_grads(params, client, number, option)
            with torch.no_grad():
                for param in params:
                    if param.grad is not None:
                        param.sub_(param.grad)
            clients.collect(client, n_examples=1 + client * client)
        clients.step()
    return Digests(digest(params), ())

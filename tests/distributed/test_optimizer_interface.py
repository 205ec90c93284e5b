"""It is a torch.optim.Optimizer: schedules, closures, groups, workers of one's choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distlion
import matrix
from cluster import run_workers
from matrix import describe_for_oracle
from oracle import Group, OracleCluster
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_all_equal,
    assert_equal_to_the_bit,
    initial_values,
    make_optimizer,
    play_oracle,
    play_worker,
    set_grads,
    simple_case,
    snapshot,
    worker_grads,
)

pytestmark = pytest.mark.distributed


def warm_up(step: int) -> float:
    """From lr = 0."""
    return min(step / 4, 1.0)


def run_with_schedule(rank: int, world_size: int, case: Case) -> Outcome:
    optimizer = make_optimizer(case, rank=rank)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    for step in range(case.steps):
        set_grads(optimizer, worker_grads(case, step, rank))
        optimizer.step()
        scheduler.step()
    return snapshot(optimizer)


@pytest.mark.slow
def test_schedule_with_a_warm_up_from_zero_is_followed() -> None:
    case = simple_case(steps=10)
    spec = case.groups[0]
    group = Group(
        initial_values(case), describe_for_oracle(spec.rule), spec.lr, spec.betas, spec.weight_decay
    )
    cluster = OracleCluster([group], 3, seed=case.seed)
    for step in range(case.steps):
        group.lr = spec.lr * warm_up(step)
        cluster.step([worker_grads(case, step, rank) for rank in range(3)])
    expected = [Outcome(cluster.params, cluster.exp_avgs[rank]) for rank in range(3)]
    assert_all_equal(run_workers(run_with_schedule, 3, case), expected)


def run_with_closure(rank: int, world_size: int, case: Case) -> tuple[Outcome, list[float], int]:
    optimizer = make_optimizer(case, rank=rank)
    losses, calls = [], 0
    for step in range(case.steps):

        def closure(step: int = step) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert torch.is_grad_enabled()
            set_grads(optimizer, worker_grads(case, step, rank))
            return torch.tensor(float(step))

        losses.append(float(optimizer.step(closure)))
    return snapshot(optimizer), losses, calls


def test_closure_is_called_once_for_each_step_and_its_loss_returned() -> None:
    case = simple_case(steps=5)
    results = run_workers(run_with_closure, 2, case)
    assert [(losses, calls) for _, losses, calls in results] == [([0.0, 1.0, 2.0, 3.0, 4.0], 5)] * 2
    assert_all_equal([outcome for outcome, _, _ in results], play_oracle(case, 2))


def step_without_closure(rank: int, world_size: int) -> Any:
    optimizer = make_optimizer(simple_case(), rank=rank)
    set_grads(optimizer, worker_grads(simple_case(), 0, rank))
    return optimizer.step()


@pytest.mark.slow
def test_step_without_closure_returns_none() -> None:
    assert run_workers(step_without_closure, 2) == [None, None]


ADDED = GroupSpec(distlion.Average(), (130, 2), lr=5e-3, betas=(0.8, 0.9), weight_decay=0.2)


def run_with_added_group(rank: int, world_size: int, case: Case) -> Outcome:
    whole = Case("whole", (*case.groups, ADDED), seed=case.seed, absent=True)
    optimizer = make_optimizer(case, rank=rank)
    for step in range(4):
        set_grads(optimizer, worker_grads(case, step, rank))
        optimizer.step()
    # Ranks differ in the values of the new parameters: those of rank 0 count.
    values = initial_values(whole)[len(case.sizes) :]
    params = [torch.nn.Parameter(torch.from_numpy(v if rank == 0 else v * 0)) for v in values]
    optimizer.add_param_group(
        {
            "params": params,
            "lr": ADDED.lr,
            "betas": ADDED.betas,
            "weight_decay": ADDED.weight_decay,
            "aggregation": ADDED.rule,
        }
    )
    for step in range(4, 10):
        set_grads(optimizer, worker_grads(whole, step, rank))
        optimizer.step()
    assert optimizer.committed_step == 10
    return snapshot(optimizer)


def test_added_group_votes_from_the_next_step_on() -> None:
    case = simple_case()
    whole = Case("whole", (*case.groups, ADDED), seed=case.seed, absent=True)
    values, spec = initial_values(whole), case.groups[0]
    n = len(case.sizes)
    cluster = OracleCluster(
        [Group(values[:n], describe_for_oracle(spec.rule), spec.lr, spec.betas, spec.weight_decay)],
        3,
        seed=case.seed,
    )
    for step in range(4):
        cluster.step([worker_grads(case, step, rank) for rank in range(3)])
    cluster.add_group(
        Group(
            values[n:], describe_for_oracle(ADDED.rule), ADDED.lr, ADDED.betas, ADDED.weight_decay
        )
    )
    for step in range(4, 10):
        cluster.step([worker_grads(whole, step, rank) for rank in range(3)])
    expected = [Outcome(cluster.params, cluster.exp_avgs[rank]) for rank in range(3)]
    assert_all_equal(run_workers(run_with_added_group, 3, case), expected)


def list_group_keys(rank: int, world_size: int) -> tuple[set[str], int]:
    model = torch.nn.Linear(3, 2)
    optimizer = distlion.DistributedLion(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    return set(optimizer.param_groups[0]), optimizer.param_groups[0]["step"]


def test_param_group_holds_its_documented_keys() -> None:
    keys = {"params", "param_names", "lr", "betas", "weight_decay", "cautious", "aggregation"}
    keys |= {"orthogonalize"}
    keys |= {"step", "worker"}
    assert run_workers(list_group_keys, 2) == [(keys, 1)] * 2


def run_in_subgroup(rank: int, world_size: int, cases: tuple[Case, Case]) -> Outcome:
    """Odd ranks train one model, even ranks another, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, case = groups[rank % 2], cases[rank % 2]
    optimizer = make_optimizer(case, rank=dist.get_rank(mine), process_group=mine)
    for step in range(case.steps):
        set_grads(optimizer, worker_grads(case, step, dist.get_rank(mine)))
        optimizer.step()
    optimizer.verify_replicas()
    return snapshot(optimizer)


def test_process_group_argument_chooses_who_votes() -> None:
    """Coins take the rank in the voting group; parameters come from its first rank."""
    spec = GroupSpec(distlion.Average(), (65, 700), lr=3e-3)
    cases = (simple_case(steps=8), Case("other", (spec,), seed=4, steps=8))
    outcomes = run_workers(run_in_subgroup, 4, cases)
    assert_all_equal(outcomes[0::2], play_oracle(cases[0], 2))
    assert_all_equal(outcomes[1::2], play_oracle(cases[1], 2))


def play_twice(rank: int, world_size: int, case: Case) -> bool:
    """Whatever is drawn in between: the library touches no global seed and reads none."""
    first = play_worker(rank, world_size, case)
    torch.manual_seed(rank + 77)
    before = torch.get_rng_state()
    second = play_worker(rank, world_size, case)
    assert_equal_to_the_bit(second, first, f"rank {rank}")
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_run_repeats_to_the_bit_and_leaves_the_global_seed_alone() -> None:
    assert run_workers(play_twice, 3, simple_case(steps=6)) == [True] * 3


def seeds_differ(rank: int, world_size: int) -> bool:
    one, other = (play_worker(rank, world_size, simple_case(steps=3)), None)
    case = simple_case(steps=3)
    other = play_worker(
        rank, world_size, Case(case.name, case.groups, steps=3, seed=99, absent=True)
    )
    return any(not np.array_equal(a, b) for a, b in zip(one.params, other.params, strict=True))


@pytest.mark.slow
def test_another_seed_gives_another_run() -> None:
    assert run_workers(seeds_differ, 2) == [True] * 2


def learn(rank: int, world_size: int, aggregation: Any) -> tuple[float, float]:
    """Fit a line to data of which each worker has its own part."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 5, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0]) + 0.1 * torch.randn(64, generator=generator)
    model = torch.nn.Linear(5, 1)
    # Short momenta: 60 steps are too few for the usual ones to settle.
    optimizer = distlion.DistributedLion(
        model.parameters(), lr=0.06, betas=(0.5, 0.5), aggregation=aggregation
    )
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.verify_replicas()
    return losses[0], losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", matrix.first_of_each_class())
def test_workers_learn_together(name: str) -> None:
    for first, last in run_workers(learn, 3, matrix.RULES[name]):
        assert last < 0.01 * first

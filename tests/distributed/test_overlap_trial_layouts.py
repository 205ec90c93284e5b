"""The trial of overlap where parameters are sharded, where workers are nodes, and beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distlion
import oracle
from cluster import run_workers
from distributed import sharded_models
from failures import params_of
from replay import run_backward

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 64
SLOW, FAST = 2.0, 1.0
# Rank 2 measures the opposite, by less: the mean over all ranks decides.
OUTLIER, LESS = 2, 0.25


class Clock:
    """Seconds by what a step takes with overlap and without."""

    def __init__(self, trial: Any, *, with_s: float, without_s: float) -> None:
        self._trial, self._seconds = trial, {True: with_s, False: without_s}
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._seconds[self._trial.overlaps]
        return self._now


def set_clock(optimizer: distlion.DistributedLion, *, pays: bool) -> None:
    trial = optimizer._session.routing.trial
    with_s, without_s = (FAST, SLOW) if pays else (SLOW, FAST)
    if optimizer._session.ranks.rank == OUTLIER:
        with_s, without_s = LESS * without_s, LESS * with_s
    trial._clock = Clock(trial, with_s=with_s, without_s=without_s)


def verdict(optimizer: distlion.DistributedLion) -> tuple[bool, bool]:
    """Return whether the trial is over, and whether votes leave during backward."""
    trial = optimizer._session.routing.trial
    assert optimizer._session.overlap._waits == (not trial.overlaps)
    return trial.is_over, trial.overlaps


def try_with_shards(rank: int, world_size: int) -> tuple[bool, list[bool], tuple[bool, bool]]:
    """Train with gradients that are set to zero, and not to None, between steps."""
    mesh = sharded_models.make_mesh(2, 2)
    model = sharded_models.shard(sharded_models.build(), mesh["shard"])
    optimizer = sharded_models.make_optimizer(model, mesh, overlap="auto", bucket_elements=64)
    set_clock(optimizer, pays=True)
    reference, started = sharded_models.Reference(2), []
    for step in range(STEPS + 2):
        sharded_models.run_backward(model, step, rank)
        reference.step(sharded_models.gather_gradients(model, mesh))
        started.append(optimizer._session.overlap._n_started > 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return reference.equals(model), started, verdict(optimizer)


def test_shards_have_the_bits_of_whole_parameters_in_all_stretches() -> None:
    stretches = ([True] * 8 + [False] * 8) * 4
    expected = True, [*stretches, True, True], (True, True)
    assert run_workers(try_with_shards, 4, timeout_s=240) == [expected] * 4


def make(rank: int, **options: Any) -> distlion.DistributedLion:
    params = [
        (f"p{index}", torch.nn.Parameter(torch.full((n,), 0.5))) for index, n in enumerate((90, 60))
    ]
    settings = {
        "lr": 1e-2,
        "bucket_elements": 64,
        "timeouts": distlion.Timeouts(step_s=20),
        **options,
    }
    return distlion.DistributedLion(params, **settings)


def train(optimizer: distlion.DistributedLion, rank: int, step: int, seed: int = 3) -> None:
    grads = [
        oracle.gradient(seed, step, rank, index, p.numel())
        for index, p in enumerate(params_of(optimizer))
    ]
    run_backward(optimizer, grads)
    optimizer.step()
    optimizer.zero_grad()


def equal(first: distlion.DistributedLion, second: distlion.DistributedLion) -> bool:
    pairs = zip(params_of(first), params_of(second), strict=True)
    return all(torch.equal(ours, others) for ours, others in pairs)


def try_with_nodes(rank: int, world_size: int) -> list[Any]:
    found = []
    for pays in (False, True):
        trying = make(rank, overlap="auto", nodes=distlion.Nodes(ranks_per_node=2))
        plain = make(rank, nodes=distlion.Nodes(ranks_per_node=2))
        set_clock(trying, pays=pays)
        for step in range(STEPS + 2):
            train(trying, rank, step)
            train(plain, rank, step)
        found.append((equal(trying, plain), verdict(trying)))
    return found


def test_all_ranks_of_all_nodes_come_to_one_choice_and_the_same_bits() -> None:
    expected = [(True, (True, False)), (True, (True, True))]
    assert run_workers(try_with_nodes, 4, timeout_s=120) == [expected] * 4


def try_two(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Two optimizers, of which one gains by overlap and the other does not."""
    pair = make(rank, overlap="auto"), make(rank, overlap="auto")
    for optimizer, pays in zip(pair, (True, False), strict=True):
        set_clock(optimizer, pays=pays)
    for step in range(STEPS):
        for seed, optimizer in enumerate(pair):
            train(optimizer, rank, step, seed)
    return [verdict(optimizer) for optimizer in pair]


def test_two_optimizers_choose_each_for_itself() -> None:
    assert run_workers(try_two, 3) == [[(True, True), (True, False)]] * 3


def load_in_the_trial(rank: int, world_size: int) -> list[Any]:
    """Load what was saved, in a stretch without overlap."""
    optimizer, plain = make(rank, overlap="auto"), make(rank)
    set_clock(optimizer, pays=False)
    for step in range(12):
        train(optimizer, rank, step)
        train(plain, rank, step)
    before = verdict(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    after = verdict(optimizer)
    set_clock(optimizer, pays=True)
    for step in range(12, 12 + STEPS):
        train(optimizer, rank, step)
        train(plain, rank, step)
    return [before, after, verdict(optimizer), equal(optimizer, plain)]


def test_the_trial_begins_again_where_a_state_is_loaded() -> None:
    expected = [(False, False), (False, True), (True, True), True]
    assert run_workers(load_in_the_trial, 3) == [expected] * 3

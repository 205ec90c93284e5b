"""Several backward passes in a step under overlap: no_sync() nests, and lasts; else an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import distlion
import oracle
from cluster import run_workers
from distlion.errors import GradientChangedError
from failures import Caught, assert_raised, caught, freeze_state, make_optimizer, params_of

pytestmark = pytest.mark.distributed


def backward(optimizer: distlion.DistributedLion, step: int, rank: int) -> None:
    loss = torch.zeros(())
    for index, p in enumerate(params_of(optimizer)):
        loss = loss + (p * torch.from_numpy(oracle.gradient(5, step, rank, index, p.numel()))).sum()
    loss.backward()


def accumulate(optimizer: distlion.DistributedLion, rank: int) -> None:
    with optimizer.no_sync():
        backward(optimizer, 0, rank)
        backward(optimizer, 1, rank)


def nest(optimizer: distlion.DistributedLion, rank: int) -> None:
    with optimizer.no_sync():
        with optimizer.no_sync():
            backward(optimizer, 0, rank)
        backward(optimizer, 1, rank)


def fail_inside(optimizer: distlion.DistributedLion, rank: int) -> None:
    with suppress(RuntimeError), optimizer.no_sync():
        backward(optimizer, 0, rank)
        raise RuntimeError


def add_group(optimizer: distlion.DistributedLion, rank: int) -> None:
    with optimizer.no_sync():
        backward(optimizer, 0, rank)
        optimizer.add_param_group({"params": [("added", nn.Parameter(torch.ones(90)))]})
        backward(optimizer, 1, rank)


def load_state(optimizer: distlion.DistributedLion, rank: int) -> None:
    with optimizer.no_sync():
        backward(optimizer, 0, rank)
        optimizer.load_state_dict(optimizer.state_dict())
        backward(optimizer, 1, rank)


PAUSES: dict[str, Callable[[distlion.DistributedLion, int], None]] = {
    "plain": accumulate,
    "nested": nest,
    "an error inside": fail_inside,
    "add_param_group": add_group,
    "load_state_dict": load_state,
}


def train(rank: int, world_size: int) -> dict[str, tuple[list[bytes], list[bytes], int, list[int]]]:
    """Return states without overlap and with it, buckets that left early, and hooks."""
    found = {}
    for name, pause in PAUSES.items():
        states: list[Any] = []
        for overlap in (False, True):
            optimizer = make_optimizer(
                overlap=overlap, bucket_elements=64, exchange=distlion.AllReduce()
            )
            for step in (2, 3):
                optimizer.zero_grad()
                if step == 2:
                    pause(optimizer, rank)
                backward(optimizer, step, rank)
                kept = optimizer._session.overlap
                n_started = 0 if kept is None else kept._n_started
                optimizer.step()
            states.append(freeze_state(optimizer))
        hooks = [len(p._post_accumulate_grad_hooks) for p in params_of(optimizer)]
        found[name] = (*states, n_started, hooks)
    return found  # type: ignore[return-value]


@functools.cache
def trained() -> list[dict[str, Any]]:
    return run_workers(train, 2)


@pytest.mark.parametrize("name", PAUSES)
def test_a_pause_lasts_until_no_sync_ends(name: str) -> None:
    for found in trained():
        without, with_overlap, n_started, hooks = found[name]
        assert with_overlap == without
        assert n_started > 0, "after the pause no vote left during backward"
        assert set(hooks) == {1}


def checkpoint_shared(rank: int, world_size: int) -> list[Caught | None]:
    """Run one layer twice under activation checkpointing, reentrant and not."""
    found = []
    for use_reentrant in (True, False):
        torch.manual_seed(rank)
        first, shared = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = make_optimizer(
            [*first.named_parameters("first"), *shared.named_parameters("shared")],
            overlap=True,
            bucket_elements=16,
            exchange=distlion.AllReduce(),
        )
        hidden = first(torch.randn(4, 8))
        for _ in range(2):
            hidden = checkpoint(shared, hidden, use_reentrant=use_reentrant)
        hidden.sum().backward()
        found.append(caught(optimizer, optimizer.step))
    return found


def test_reentrant_checkpointing_of_a_shared_layer_is_told_what_to_do() -> None:
    for reentrant, other in run_workers(checkpoint_shared, 2):
        assert_raised(reentrant, GradientChangedError, "shared", "use_reentrant=False")
        assert other is None

"""Workers whose raw gradients are all equal are warned, and told what to do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import oracle
from cluster import run_workers
from distlion import errors
from distlion.integrations.ddp import disable_all_reduce
from failures import (
    make_optimizer,
    set_grads,
)

pytestmark = pytest.mark.distributed


def watch_identical(rank: int, world_size: int, identical_steps: int) -> list[tuple[str, str]]:
    optimizer = make_optimizer()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(5):
            set_grads(optimizer, step, 0 if step < identical_steps else rank)
            optimizer.step()
    return [
        (str(w.message), w.filename)
        for w in seen
        if issubclass(w.category, errors.IdenticalGradientsWarning)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_identical_gradients_are_warned_of_once_with_both_causes(world_size: int) -> None:
    for messages in run_workers(watch_identical, world_size, 5):
        assert len(messages) == 1
        text, file = messages[0]
        for fragment in (
            "DistributedDataParallel",
            "same data",
            "disable_all_reduce",
            "Your trainer",
        ):
            assert fragment in text
        assert file == __file__  # the line of the user, not one of ours or of torch


@pytest.mark.parametrize("identical_steps", [0, 1, 2])
def test_gradients_that_part_within_three_steps_are_no_cause_for_a_warning(
    identical_steps: int,
) -> None:
    assert run_workers(watch_identical, 3, identical_steps) == [[]] * 3


def test_one_worker_is_never_warned_of_identical_gradients() -> None:
    assert run_workers(watch_identical, 1, 5) == [[]]


def train_under_ddp(
    rank: int, world_size: int, disabled: bool
) -> tuple[list[str], list[np.ndarray]]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    if disabled:
        disable_all_reduce(model)
    optimizer = make_optimizer(list(model.named_parameters()))
    first_grads: list[np.ndarray] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            data = torch.from_numpy(oracle.values(4, step, rank, n=8)).reshape(2, 4)
            model(data).pow(2).sum().backward()
            if step == 0:
                first_grads = [p.grad.numpy().copy() for p in model.parameters()]
            optimizer.step()
    texts = [
        str(w.message) for w in seen if issubclass(w.category, errors.IdenticalGradientsWarning)
    ]
    return texts, first_grads


def local_grads(rank: int) -> list[np.ndarray]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    model(torch.from_numpy(oracle.values(4, 0, rank, n=8)).reshape(2, 4)).pow(2).sum().backward()
    return [p.grad.numpy() for p in model.parameters()]


def test_ddp_that_averages_gradients_is_warned_of() -> None:
    for texts, _ in run_workers(train_under_ddp, 2, False):
        assert len(texts) == 1 and "disable_all_reduce" in texts[0]


def test_disable_all_reduce_keeps_the_gradients_of_a_ddp_model_local() -> None:
    outcomes = run_workers(train_under_ddp, 2, True)
    for rank, (texts, grads) in enumerate(outcomes):
        assert texts == []
        for ours, theirs in zip(grads, local_grads(rank), strict=True):
            assert np.array_equal(ours, theirs)

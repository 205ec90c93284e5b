"""Steps without any gradient are committed and move nothing: a script that does so is told."""

from __future__ import annotations

import warnings

import pytest
import torch

from cluster import run_workers
from distlion import errors
from distlion.step.gradients import WATCHED_STEPS
from failures import make_optimizer, params_of, set_grads

pytestmark = pytest.mark.distributed


def watch_absence(
    rank: int, world_size: int, first_absent: int, overlap: bool
) -> tuple[list[tuple[str, str]], list[bool]]:
    """Return what was warned of with its file, and whether each step moved anything."""
    optimizer = make_optimizer(overlap=overlap)
    moved = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(first_absent + 2):
            optimizer.zero_grad()
            if step < first_absent:
                set_grads(optimizer, step, rank)
            before = params_of(optimizer)[0].detach().clone()
            optimizer.step()
            moved.append(not torch.equal(before, params_of(optimizer)[0]))
    absent = [w for w in seen if issubclass(w.category, errors.AbsentGradientsWarning)]
    return [(str(w.message), w.filename) for w in absent], moved


@pytest.mark.parametrize(
    ("world_size", "first_absent", "overlap"),
    [(2, 0, False), (2, WATCHED_STEPS + 1, False), (2, 0, True), (1, 0, False)],
)
def test_a_step_without_any_gradient_is_warned_of_once_with_the_usual_reasons(
    world_size: int, first_absent: int, overlap: bool
) -> None:
    for found, moved in run_workers(watch_absence, world_size, first_absent, overlap):
        assert moved == [True] * first_absent + [False] * 2
        assert len(found) == 1
        message, file = found[0]
        for reason in (
            "zero_grad",
            "backward",
            "another model object",
            "set_requires_all_reduce",
            "set_requires_gradient_sync",
        ):
            assert reason in message
        assert file == __file__


def step_with_few(rank: int, world_size: int, policy: str) -> list[str]:
    """Rank 1 has no gradient in the first step; in the second, none is finite anywhere."""
    optimizer = make_optimizer(nonfinite=policy)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if rank != 1:
            set_grads(optimizer, 0, rank)
        optimizer.step()
        for param in params_of(optimizer):
            param.grad = torch.full(param.shape, float("nan"))
        optimizer.step()
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("policy", ["skip", "abstain"])
def test_a_gradient_on_some_worker_is_no_cause_for_a_warning(policy: str) -> None:
    assert run_workers(step_with_few, 2, policy) == [[], []]

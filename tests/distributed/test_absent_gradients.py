"""Steps without any gradient are committed and move nothing: a script that does so is told."""

from __future__ import annotations

import warnings

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from distlion.step.gradients import STEPS_OF_USE, WATCHED_STEPS
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


class Part:
    """Parameters of which some are never, or only on one worker, or rarely used."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        sizes = {"used": 5, "elsewhere": 4, "rare": 3, "frozen": 2, "empty": 0}
        names = [*sizes, *(f"unused{number}" for number in range(6))]
        params = [torch.nn.Parameter(torch.ones(sizes.get(name, 3))) for name in names]
        self.named = dict(zip(names, params, strict=True))
        self.named["frozen"].requires_grad_(False)

    def fill(self, step: int, *, is_local: bool) -> None:
        for name in ("used", "elsewhere", "rare"):
            is_here = name == "used" or (name == "elsewhere" and (self.rank == 0 or is_local))
            if is_here or (name == "rare" and step == STEPS_OF_USE - 1):
                (self.named[name] * (self.rank + 1 + step)).sum().backward()


def watch_use(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return what is warned of, by optimizer."""
    found = {}
    for case in ("plain", "overlap", "local"):
        part, is_local = Part(rank), case == "local"
        params = list(part.named.items())
        if is_local:
            inner = torch.optim.SGD(params, lr=0.1)
            optimizer = distlion.LocalSteps(inner, every=2)
        else:
            optimizer = make_optimizer(params, overlap=case == "overlap")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for step in range(STEPS_OF_USE + 12):
                if step == STEPS_OF_USE - 1:
                    found[f"{case}, before"] = [str(w.message) for w in seen]
                part.fill(step, is_local=is_local)
                optimizer.step()
                optimizer.zero_grad()
        unused = [w for w in seen if w.category is errors.UnusedParametersWarning]
        found[case] = [f"{w.message} {w.filename}" for w in unused]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_no_worker_uses_in_the_first_steps_are_named_once(world_size: int) -> None:
    for found in run_workers(watch_use, world_size):
        for case in ("plain", "overlap", "local"):
            assert found[f"{case}, before"] == []
            (said,) = found[case]
            where = "on this worker" if case == "local" else "on any worker"
            assert said.startswith(f"6 of 9 parameters had no gradient {where} in the first 10")
            assert "unused0, unused1, unused2, unused3, unused4 and 1 more." in said
            assert said.endswith(__file__)

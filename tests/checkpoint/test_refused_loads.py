"""A load that is refused late leaves model, optimizer, schedule and random numbers as they were."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedules

from checkpoint.runs import Run
from distlion import errors


class Decay:
    """A callable object, whose attributes LambdaLR saves and loads."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, [0]

    def __call__(self, step: int) -> float:
        self.calls[0] += 1
        return self.factor**step


class Nested:
    """A schedule of somebody's own, which loads in place and below the surface."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.inner = Decay(0.5)
        self.recent, self.seen, self.table = deque([1.0], maxlen=4), {1}, np.zeros(2)
        self.total, self.generator = torch.zeros(2), torch.Generator()

    def step(self) -> None:
        self.recent.append(self.inner(1))
        self.seen.add(len(self.seen) + 1)
        self.total += torch.rand(2, generator=self.generator)
        self.table += 1

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.inner.calls), "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step()
        self.inner.calls[:] = state["calls"]
        self.inner.new = 1
        self.total.copy_(state["total"])
        self.optimizer.param_groups[0]["lr"] = 5.0
        random.random()
        np.random.random()  # noqa: NPY002, as programs do
        torch.rand(1)


def chain(optimizer: Any) -> Any:
    parts = [schedules.LambdaLR(optimizer, Decay(0.9)), schedules.ExponentialLR(optimizer, 0.5)]
    return schedules.ChainedScheduler(parts, optimizer)


def sequence(optimizer: Any) -> Any:
    parts = [schedules.ConstantLR(optimizer), schedules.LambdaLR(optimizer, lambda step: 0.1)]
    return schedules.SequentialLR(optimizer, parts, milestones=[1])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
    "LambdaLR of an object": lambda optimizer: schedules.LambdaLR(optimizer, Decay(0.9)),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, Decay(0.9)),
    "ReduceLROnPlateau": schedules.ReduceLROnPlateau,
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(
        optimizer, 0.1, total_steps=20, cycle_momentum=False
    ),
    "CyclicLR": lambda optimizer: schedules.CyclicLR(
        optimizer, 1e-3, 1e-2, scale_fn=Decay(0.9), cycle_momentum=False
    ),
    "ChainedScheduler": chain,
    "SequentialLR": sequence,
    "somebody's own": Nested,
}


def picture(value: Any) -> Any:
    """Copy what there is, and which object it is, into something that compares with ==."""
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, torch.Tensor | np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, dict):
        return {key: picture(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque | set):
        return type(value), [picture(each) for each in value]
    if isinstance(value, Decay | Nested | schedules.LRScheduler):
        rest = {key: each for key, each in vars(value).items() if key != "optimizer"}
        return id(value), picture(rest)
    return value


def everything(run: Run) -> Any:
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.param_groups
    ]
    place = np.random.get_state()[2]  # noqa: NPY002
    chance = random.getstate(), place, torch.get_rng_state().tolist()
    return picture([run.scheduler, groups, chance])


def make_run(name: str) -> Run:
    run = Run()
    run.scheduler = SCHEDULES[name](run.optimizer)
    return run


def train(run: Run, start: int, stop: int) -> None:
    for step in range(start, stop):
        for worker in range(run.optimizer.workers):
            run.measure_loss(step, worker).backward()
            run.optimizer.collect(worker)
        run.optimizer.step()
        is_plateau = isinstance(run.scheduler, schedules.ReduceLROnPlateau)
        run.scheduler.step(*[1.0] * is_plateau)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_load_that_the_optimizer_refuses_changes_nothing(tmp_path: Path, name: str) -> None:
    saved = make_run(name)
    train(saved, 0, 3)
    saved.save(tmp_path)
    run = make_run(name)
    train(run, 0, 1)
    run.measure_loss(1, 0).backward()
    run.optimizer.collect(0)
    before, tensors = everything(run), run.tensors()
    with pytest.raises(errors.InvalidArgumentError, match="load_state_dict"):
        run.load(tmp_path)
    assert everything(run) == before
    assert run.equals(tensors)
    for worker in range(1, run.optimizer.workers):  # and it goes on
        run.measure_loss(1, worker).backward()
        run.optimizer.collect(worker)
    run.optimizer.step()
    assert run.load(tmp_path).step == 3
    assert run.equals(saved.tensors())

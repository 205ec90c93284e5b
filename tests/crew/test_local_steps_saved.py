"""Checkpoints of a crew with local steps: saved inside of a period, resumed by any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from crews import await_members, draw_loss, host_store, make_crew, make_model, start
from distlion.crew import CrewLocalSteps
from distlion.errors import CheckpointError
from local_runs import are_equal
from tiers import in_tiers

EVERY, SAVED_AT, GOAL = 4, 10, 22
OPTIONS: dict[str, dict[str, Any]] = {
    "residuals, momentum": {"aggregation": distlion.ResidualVote(), "outer_momentum": 0.5},
    "estimates": {"aggregation": distlion.EstimateVote()},
}


class Run:
    """A worker of a crew, with its model and its schedule."""

    def __init__(self, crew: distlion.Crew, seed: int, **options: Any) -> None:
        self.crew, self.model = crew, make_model(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        settings = {"every": EVERY, "exchange": distlion.AllReduce(), **options}
        self.optimizer: CrewLocalSteps = crew.local_steps(inner, **settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        crew.carry(scheduler=self.scheduler)

    def train(self, goal: int) -> None:
        while self.optimizer.local_step < goal:
            draw_loss(self.model, self.optimizer.local_step, self.crew.rank).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def everything(self) -> tuple[nn.Module, Any, Any]:
        return self.model, self.optimizer, self.scheduler

    def tensors(self) -> list[Tensor]:
        found = [*self.model.parameters(), *self.optimizer.common_point]
        found += self.optimizer.outer_buffers
        for entries in (self.optimizer.state, self.optimizer.outer_optimizer.state):
            found += [value for entry in entries.values() for value in entry.values()]
        return [torch.as_tensor(each).detach().clone() for each in found]


def save(rank: int, size: int, port: int, folder: str, name: str) -> Any:
    """Save inside of a period, and go on."""
    with make_crew(port, min_workers=size, max_workers=size) as crew:
        run = Run(crew, rank, **OPTIONS[name])
        await_members(crew, size)
        run.train(SAVED_AT)
        distlion.save_checkpoint(f"{folder}/saved", *run.everything()).wait()
        place, saved = crew.rank, run.tensors()
        run.train(GOAL)
        return place, saved, run.tensors()


def resume(rank: int, size: int, port: int, folder: str, name: str, rule: Any) -> Any:
    """Load it, in a crew that has begun a period of its own; then go on."""
    with make_crew(port, min_workers=size, max_workers=size, run_id="again") as crew:
        run = Run(crew, rank + 10, **OPTIONS[name])
        run.train(1)
        distlion.load_checkpoint(f"{folder}/saved", *run.everything(), on_world_change=rule)
        counts = run.optimizer.local_step, run.optimizer.committed_step
        run.train(GOAL)
        run.optimizer.vote()
        run.optimizer.verify_replicas()
        return counts, [each.clone() for each in run.model.parameters()]


def resume_whole(rank: int, size: int, port: int, folder: str, name: str) -> Any:
    with make_crew(port, min_workers=size, max_workers=size, run_id="again") as crew:
        run = Run(crew, rank + 10, **OPTIONS[name])
        distlion.load_checkpoint(f"{folder}/saved", *run.everything())
        place, loaded = crew.rank, run.tensors()
        run.train(GOAL)
        return place, loaded, run.tensors()


@pytest.mark.parametrize("name", in_tiers(OPTIONS, lambda name: name == "estimates"))
def test_a_crew_resumes_inside_of_a_period_to_the_bits_of_an_uninterrupted_run(
    tmp_path: Path, name: str
) -> None:
    store, folder = host_store(), str(tmp_path)
    saved = sorted(start(save, 2, store.port, folder, name), key=lambda each: each[0])
    found = sorted(start(resume_whole, 2, store.port, folder, name), key=lambda each: each[0])
    for (_, then, whole), (_, loaded, resumed) in zip(saved, found, strict=True):
        assert are_equal(loaded, then)
        assert are_equal(resumed, whole)


@pytest.mark.slow
def test_another_number_of_members_goes_on_from_the_common_point(tmp_path: Path) -> None:
    store, folder, name = host_store(), str(tmp_path), "residuals, momentum"
    start(save, 2, store.port, folder, name)
    found = start(resume, 3, store.port, folder, name, "mean")
    for counts, own in found:
        assert counts == (SAVED_AT, SAVED_AT // EVERY)
        assert are_equal(own, found[0][1])


def fail_to_load(rank: int, size: int, port: int, folder: str, name: str) -> Any:
    """A load fails once it has begun to overwrite; the crew is as before, and goes on."""
    with make_crew(port, min_workers=size, max_workers=size, run_id="again") as crew:
        run = Run(crew, rank + 10, **OPTIONS[name])
        run.train(EVERY + 1)
        before, alive = run.tensors(), (vars(crew), vars(crew._membership))
        known = [dict(each) for each in alive]
        for each in alive:
            each["marked"] = True

        def fail(_: object) -> None:
            for each in alive:
                del each["marked"]
            raise ValueError

        run.scheduler.load_state_dict = fail  # type: ignore[method-assign]
        with pytest.raises(CheckpointError):
            distlion.load_checkpoint(f"{folder}/saved", *run.everything())
        assert [*alive] == known  # not put back: its threads go on meanwhile
        assert are_equal(run.tensors(), before)
        run.train(3 * EVERY)
        return [each.clone() for each in run.optimizer.common_point]


def test_a_crew_goes_on_where_a_load_has_failed(tmp_path: Path) -> None:
    store, folder, name = host_store(), str(tmp_path), "residuals, momentum"
    start(save, 2, store.port, folder, name)
    first, second = start(fail_to_load, 2, store.port, folder, name)
    assert are_equal(first, second)

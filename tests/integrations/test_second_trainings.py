"""Bridges serve models and optimizers made after the first ones, and by a user's own methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from integrations.exam import tell_place
from integrations.hf_job import Dropping, error_of, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Facts = dict[str, Any]


def describe(trainer: Any) -> Facts:
    """Train, and return what the bridge did for this optimizer."""
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "logged": [entry.get("votes/sent_bytes") is not None for entry in logged],
        "drawn": float(trainer.model.drawn),
        "expects all saved": trainer.voter._has_told_of_state,
    }


def train_twice(rank: int, world_size: int, folder: str) -> list[Facts]:
    from integrations.with_trainer import VotingTrainer

    tell_place(rank, world_size)

    def make(model: Any, *args: Any, **kwargs: Any) -> Any:
        return VotingTrainer(None, *args, **kwargs, model_init=lambda: Dropping(rank))

    trainer = make_trainer(folder, rank, kind=make)
    return [describe(trainer), describe(trainer)]


def make_own_optimizer(rank: int, world_size: int, folder: str) -> Facts:
    from integrations.with_trainer import VotingTrainer

    tell_place(rank, world_size)

    class OwnTrainer(VotingTrainer):
        clip_norm: distlion.ClipNorm | None = None

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = distlion.DistributedLion(
                self.model.parameters(), clip_norm=self.clip_norm
            )
            return self.optimizer

    class Clipping(OwnTrainer):
        clip_norm = distlion.ClipNorm(1.0)

    facts = describe(make_trainer(folder, rank, kind=OwnTrainer))
    twice = make_trainer(folder, rank, kind=Clipping, max_grad_norm=1.0)
    return {**facts, "clips twice": error_of(twice.train)}


AS_FOR_THE_FIRST = {"logged": [True] * 4, "drawn": 0.0, "expects all saved": True}


def test_each_optimizer_of_a_trainer_is_measured_and_begins_with_equal_buffers(
    tmp_path: Path,
) -> None:
    for facts in run_workers(train_twice, 2, str(tmp_path), timeout_s=150):
        assert facts == [AS_FOR_THE_FIRST, AS_FOR_THE_FIRST]


def test_an_optimizer_of_a_trainers_own_method_is_checked_and_measured(tmp_path: Path) -> None:
    for facts in run_workers(make_own_optimizer, 2, str(tmp_path), timeout_s=150):
        kind, said = facts.pop("clips twice")
        assert (kind, facts) == (errors.InvalidArgumentError, AS_FOR_THE_FIRST)
        assert "max_grad_norm=0" in said


def save_after_another(rank: int, world_size: int, folder: str) -> Facts:
    from distlion.integrations.accelerate import VotingAccelerator

    tell_place(rank, world_size)

    def train(accelerator: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, distlion.DistributedLion(model.parameters()))
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        return model, optimizer

    accelerator = VotingAccelerator(cpu=True)
    accelerator.free_memory(*train(accelerator))
    model, _ = train(accelerator)
    accelerator.save_state(folder)
    fresh = VotingAccelerator(cpu=True)
    loaded, optimizer = train(fresh)
    fresh.load_state(folder)
    facts = {
        "saved": sorted(name for name in os.listdir(folder) if name.startswith("distlion")),
        "loaded": torch.equal(loaded.weight, model.weight) and optimizer.optimizer.committed_step,
    }
    with accelerator.join_uneven_inputs([model], even_batches=True):
        pass

    def join() -> None:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass

    return {**facts, "uneven": error_of(join)}


def test_accelerate_saves_what_was_prepared_since_it_freed_its_memory(tmp_path: Path) -> None:
    for facts in run_workers(save_after_another, 2, str(tmp_path / "saved"), timeout_s=150):
        kind, said = facts.pop("uneven")
        assert facts == {"saved": ["distlion"], "loaded": 1}
        assert kind is errors.UnsupportedTypeError and "even_batches=True" in said


def fold_twice(rank: int, world_size: int, folder: str) -> list[int]:
    import lightning

    from distlion.integrations.fabric import VotingStrategy

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=VotingStrategy())
    fabric.launch()
    model = torch.nn.Linear(3, 1)
    votes = []
    for n_steps in (3, 6):  # the first fold ends within a period
        optimizer = distlion.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), every=4)
        wrapped, prepared = fabric.setup(model, optimizer)
        for _ in range(n_steps):
            fabric.backward(wrapped(torch.ones(2, 3)).square().mean())
            prepared.step()
            prepared.zero_grad()
        votes.append(optimizer)
    fabric.save(os.path.join(folder, "fold.ckpt"), {"model": wrapped, "optimizer": prepared})
    return [each.committed_step for each in votes]


def test_an_optimizer_that_another_one_has_replaced_votes_no_more(tmp_path: Path) -> None:
    (found,) = run_workers(fold_twice, 1, str(tmp_path))
    assert found == [0, 2]

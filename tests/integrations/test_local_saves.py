"""Models are saved under local steps: by Fabric after a vote, by Accelerate only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import distlion
from distlion.errors import CheckpointError
from local_runs import are_equal

pytest.importorskip("lightning")
from distlion.integrations import fabric

# To import the trainer takes seconds.
pytestmark = pytest.mark.slow


@pytest.fixture
def saved() -> Any:
    with mock.patch.object(fabric.DDPStrategy, "save_checkpoint") as save:
        yield save


def take_steps(strategy: fabric.VotingStrategy) -> tuple[torch.nn.Module, distlion.LocalSteps]:
    module = torch.nn.Linear(3, 1)
    optimizer = distlion.LocalSteps(torch.optim.SGD(module.parameters(), 0.1), every=4)
    strategy.setup_optimizer(optimizer)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def test_workers_vote_before_a_module_is_saved_alone(saved: Any, tmp_path: Path) -> None:
    strategy = fabric.VotingStrategy()
    module, optimizer = take_steps(strategy)
    strategy.save_checkpoint(tmp_path / "model.ckpt", {"model": module})
    assert saved.call_count == 1
    assert (optimizer.committed_step, optimizer.steps_since_vote) == (1, 0)


def test_nothing_votes_where_no_module_is_saved(saved: Any, tmp_path: Path) -> None:
    strategy = fabric.VotingStrategy()
    _, optimizer = take_steps(strategy)
    strategy.save_checkpoint(tmp_path / "numbers.ckpt", {"epoch": 3})
    assert saved.call_count == 1
    assert (optimizer.committed_step, optimizer.steps_since_vote) == (0, 2)


def test_accelerate_saves_no_model_between_two_votes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from distlion.integrations.accelerate import VotingAccelerator

    accelerator = VotingAccelerator(cpu=True)
    module = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(module.parameters(), 0.1)
    model, optimizer = accelerator.prepare(module, distlion.LocalSteps(inner, every=4))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"taken 1 local steps .* call accelerator.vote"):
        accelerator.save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())
    accelerator.vote()
    accelerator.save_model(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_trainer_saves_no_model_between_two_votes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import TrainerCallback

    from integrations.hf_job import error_of, make_trainer

    said: list[str] = []

    class Save(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            said.append(error_of(lambda: trainer.save_model(str(tmp_path / "early")))[1])
            trainer.voter.vote()
            trainer.save_model(str(tmp_path / "voted"))

    local = distlion.LocalSteps, {"inner": torch.optim.AdamW, "every": 8}
    choice = {"optimizer_cls_and_kwargs": local, "callbacks": [Save()]}
    trainer = make_trainer(str(tmp_path / "runs"), 0, choice=choice, max_steps=1)
    trainer.train()
    assert "taken 1 local steps" in said[0] and "call trainer.voter.vote()" in said[0]
    assert not (tmp_path / "early").exists() and (tmp_path / "voted").is_dir()


def test_a_second_training_goes_on_from_the_best_model_of_the_first(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from integrations.hf_job import make_trainer

    local = distlion.LocalSteps, {"inner": torch.optim.AdamW, "every": 3}
    trainer = make_trainer(
        str(tmp_path),
        0,
        choice={"optimizer_cls_and_kwargs": local},
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it is not what the training ends with
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert are_equal(trainer.model.parameters(), trainer.voter.common_point)
    trainer.train()
    assert trainer.voter.local_step == 8

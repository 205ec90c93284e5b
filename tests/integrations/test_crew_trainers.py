"""Trainers of frameworks are members of a crew."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cluster import WorkerDiedError
from crews import host_store, start
from distlion.crew.carried import CarriedState
from distlion.crew.optimizer import CrewLion
from distlion.crew.retry import RetryingLion
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from integrations.crew_jobs import (
    CALLED_AT,
    COME_BY,
    GOAL,
    MEMBERS,
    Train,
    be_member,
    train_with_accelerate,
    train_with_lightning,
    train_with_trainer,
)
from tiers import in_tiers


@pytest.mark.parametrize(
    "train",
    in_tiers(
        [train_with_trainer, train_with_lightning, train_with_accelerate],
        lambda train: train is train_with_trainer,
    ),
)
def test_a_member_is_killed_and_a_newcomer_comes(train: Train, tmp_path: object) -> None:
    store = host_store()
    dead, *lived = start(be_member, MEMBERS, store.port, train, str(tmp_path), may_die=True)
    assert isinstance(dead, WorkerDiedError)
    *stayed, new = lived
    for each in stayed:
        assert len(each["let_in"]) == 1  # once, and not as it begins a step
        assert each["let_in"] != ["step"]
        assert sorted(each["digests"]) == list(range(1, GOAL + 1))  # a step for each batch
    assert CALLED_AT < new["first"] <= COME_BY + 2  # the step in which it is seen counts
    assert sorted(new["digests"]) == list(range(new["first"], GOAL + 1))
    for step in range(1, GOAL + 1):
        assert len({each["digests"][step] for each in lived if step in each["digests"]}) == 1
    assert {each["counted"] for each in lived} == {GOAL}
    assert len({each["rate"] for each in lived}) == 1


def test_a_closure_runs_once_in_all_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first try finds that the epoch is over, the second one loses a member in the vote.
    tries = iter([(False, False), (True, False), (False, True)])
    given: list[bool] = []

    def step(self: CrewLion, closure: Callable[[], Any] | None = None) -> bool:
        given.append(closure is not None)
        runs, is_done = next(tries)
        if runs:
            assert closure is not None
            closure()
        return is_done

    monkeypatch.setattr(CrewLion, "step", step)
    runs: list[None] = []
    assert object.__new__(RetryingLion).step(lambda: runs.append(None)) is True
    assert given == [True, True, False]
    assert len(runs) == 1


def make_optimizer() -> tuple[RetryingLion, Any]:
    """Make an optimizer that knows what is carried, and nothing else, and a scheduler."""
    optimizer = object.__new__(RetryingLion)
    vars(optimizer)["_membership"] = SimpleNamespace(carried=CarriedState())
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    return optimizer, torch.optim.lr_scheduler.ConstantLR(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "resume", "is_carried", "said"),
    [
        ({}, "checkpoint-4", True, "resume_from_checkpoint='checkpoint-4'"),
        ({}, None, False, "the scheduler is missing, or a newcomer would begin it anew"),
        ({"max_steps": -1}, None, True, "max_steps=-1: members end at one step"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 2},
            None,
            True,
            "load_best_model_at_end=True",
        ),
    ],
)
def test_what_members_do_not_share_is_refused(
    tmp_path: Any, options: dict[str, Any], resume: Any, is_carried: bool, said: str
) -> None:
    from transformers import Trainer, TrainingArguments

    from distlion.integrations.crew_trainer import CrewMixin

    class CrewTrainer(CrewMixin, Trainer): ...

    optimizer, scheduler = make_optimizer()
    if is_carried:
        optimizer._membership.carried.add({"scheduler": scheduler})
    settings = {"max_steps": 4, "use_cpu": True, "report_to": "none", "eval_steps": 2, **options}
    arguments = TrainingArguments(str(tmp_path), **settings)
    trainer = CrewTrainer(
        nn.Linear(1, 1),
        arguments,
        train_dataset=[{}],
        eval_dataset=[{}],
        optimizers=(optimizer, scheduler),
    )
    with pytest.raises(InvalidArgumentError, match=said):
        trainer.train(resume)


@pytest.mark.slow
def test_other_processes_and_other_optimizers_are_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer, TrainingArguments

    from distlion.integrations.crew_trainer import CrewMixin

    class CrewTrainer(CrewMixin, Trainer): ...

    arguments = TrainingArguments(str(tmp_path), max_steps=4, use_cpu=True, report_to="none")
    model = nn.Linear(1, 1)
    with pytest.raises(UnsupportedTypeError, match=r"crew.optimizer\(..., retry=True\)"):
        CrewTrainer(model, arguments, optimizers=(torch.optim.SGD(model.parameters()), None))

    def make_many(self: Any) -> None:
        self.accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_CPU"))

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", make_many)
    with pytest.raises(UnsupportedTypeError, match="set up for MULTI_CPU"):
        CrewTrainer(model, arguments, optimizers=make_optimizer())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [({"ckpt_path": "last.ckpt"}, "ckpt_path='last.ckpt'"), ({"min_epochs": 2}, "min_epochs=2")],
)
def test_lightning_is_refused_what_members_do_not_share(asked: dict[str, Any], said: str) -> None:
    from lightning.pytorch.trainer.states import TrainerFn

    from distlion.integrations.lightning import CrewSteps

    fit = SimpleNamespace(min_epochs=asked.get("min_epochs"), min_steps=None)
    trainer = SimpleNamespace(ckpt_path=asked.get("ckpt_path"), fit_loop=fit)
    with pytest.raises(InvalidArgumentError, match=said):
        CrewSteps(4).setup(trainer, None, TrainerFn.FITTING)

"""Trainers of a few steps for the tests of VotingMixin, and what is read from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import distlion
from integrations.job import Job


class Dropping(torch.nn.Module):
    """The exam's model behind a layer that depends on random numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.dropout = Job("", 1).make_model(rank), torch.nn.Dropout(0.2)
        self.register_buffer("drawn", torch.tensor(float(rank)))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inner(self.dropout(pixels), labels)


def make_trainer(folder: str, rank: int, *, model: Any = None, **options: Any) -> Any:
    """Make a Trainer of 4 steps; ``options`` are TrainingArguments and what follows ``optimizer``.

    Imported here: the process of the tests itself imports no Trainer.
    """
    from transformers import TrainingArguments

    from integrations.with_trainer import VotingTrainer, make_arguments

    job = Job(folder, int(os.environ.get("WORLD_SIZE", "1")), steps=4)
    optimizer = {
        "replicas": distlion.Replicas(check_every=1),
        "timeouts": distlion.Timeouts(step_s=20),
        **options.pop("optimizer", {}),
    }
    choice = options.pop("choice", {})
    kind = options.pop("kind", VotingTrainer)
    choice = choice or {"optimizer_cls_and_kwargs": (distlion.DistributedLion, optimizer)}
    return kind(
        Dropping(rank) if model is None else model,
        TrainingArguments(**{**make_arguments(job), "logging_steps": 1, **options}),
        train_dataset=job.dataset(deal="batches"),
        eval_dataset=job.validation(),
        **choice,
    )


def state_of(trainer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return parameters and momenta."""
    params = [param.detach().clone() for param in trainer.model.parameters()]
    state = trainer.voter.state
    return params, [state[param]["exp_avg"].clone() for param in trainer.model.parameters()]


def are_equal(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b)
        for ours, theirs in zip(one, other, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def load_momenta(trainer: Any, checkpoint: str) -> list[torch.Tensor]:
    """Return the momenta with which a resumed training begins."""
    from transformers import TrainerCallback

    momenta: list[torch.Tensor] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            momenta.extend(state_of(trainer)[1])

    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=checkpoint)
    return momenta


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")

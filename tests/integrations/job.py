"""One run of the exam, as every rank is told it, and what a rank hands back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import distlion

BATCH = 8
"""Examples that a rank reads in one micro-step."""

VALIDATION = range(1797 - 60, 1797)
"""Digits to evaluate on, all of them at each evaluation: each rank its share."""

LR, WEIGHT_DECAY = 1e-2, 0.1


@dataclass(frozen=True)
class Job:
    """One run: what a contestant must do, whatever its framework calls it.

    Attributes:
        folder: Of this run, shared by all ranks, and made. All that the run writes goes in here.
        world_size: Number of ranks; the default process group is there, and torchrun's variables.
        steps: Optimizer steps at which training ends, counted from the very first one; also the
            length of the schedule of lr.
        save_at: Save a checkpoint in ``folder`` once so many steps are committed, and go on.
        resume: The ``folder`` of a run that has saved; continue with new objects where it did, at
        first_step: which its checkpoint says too.
        accumulation: Micro-steps in a step; their losses are divided by it.
        clip_norm: Largest norm of this rank's own gradients, clipped by the framework's means.
        overlap: Votes leave during backward; where there is accumulation, in its last micro-step.
        evaluation: Evaluate on all of VALIDATION each time so many steps have been committed.
        nonfinite: As of ``DistributedLion``.
        poison: (rank, step) whose examples are not finite.
        fault: (rank, step) where that rank is killed, in the middle of the step.
    """

    folder: str
    world_size: int
    steps: int = 12
    save_at: int | None = None
    resume: str | None = None
    first_step: int = 0
    accumulation: int = 1
    clip_norm: float | None = None
    overlap: bool = False
    evaluation: int | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    poison: tuple[int, int] | None = None
    fault: tuple[int, int] | None = None

    @property
    def micro_steps(self) -> int:
        """Micro-steps of the whole run, which are also the batches of each rank."""
        return self.steps * self.accumulation

    def make_model(self, rank: int) -> DigitsModel:
        """Return a model with values of this rank's own: those of rank 0 must reach all."""
        return DigitsModel(seed=rank)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Arguments of ``DistributedLion`` beside the parameters."""
        options: dict[str, Any] = {
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "replicas": distlion.Replicas(check_every=1),
            "nonfinite": self.nonfinite,
            "timeouts": distlion.Timeouts(init_s=60, step_s=20),
        }
        return {**options, "overlap": True, "bucket_elements": 256} if self.overlap else options

    def lr_factor(self, step: int) -> float:
        """Return the schedule's factor of lr for a step: a straight line down to 0."""
        return (self.steps - step) / self.steps

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return that schedule as torch has it; one ``step()`` of it follows each of ours."""
        return LambdaLR(optimizer, self.lr_factor)

    def examples(self, rank: int, micro_step: int) -> list[int]:
        """Return the digits that a rank reads in a micro-step: in turn, a batch for each rank."""
        first = (micro_step * self.world_size + rank) * BATCH
        return list(range(first, first + BATCH))

    def batches(self, rank: int, *, first_step: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of a rank, in order; a run that resumes begins with a later step."""
        data = self.dataset(deal="batches")
        for micro_step in range(first_step * self.accumulation, self.micro_steps):
            items = [data[index] for index in self.examples(rank, micro_step)]
            yield {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def dataset(self, *, deal: Literal["batches", "examples"], first_step: int = 0) -> Digits:
        """Return all examples of the run, in the order in which a framework deals them out.

        Args:
            deal: Whether ranks take whole batches in turn, as with Accelerate, or single examples,
                as with torch's DistributedSampler. Without shuffling, both ways each rank then gets
                its ``batches``.
            first_step: Leave out the examples of earlier steps.
        """
        order, poisoned = [], set()
        for micro_step in range(first_step * self.accumulation, self.micro_steps):
            of_ranks = [self.examples(rank, micro_step) for rank in range(self.world_size)]
            if deal == "examples":
                of_ranks = [list(each) for each in zip(*of_ranks, strict=True)]
            order += [index for indices in of_ranks for index in indices]
        if self.poison is not None:
            rank, step = self.poison
            poisoned = set(self.examples(rank, step * self.accumulation))
        return Digits(order, poisoned)

    def validation(self) -> Digits:
        """Return the examples to evaluate on; how ranks share them is the framework's business."""
        return Digits(list(VALIDATION), set())


@dataclass(frozen=True)
class Trained:
    """What a contestant returns; the exam makes the rank's report of it.

    Attributes:
        model: As ``make_model`` made it, unwrapped.
        optimizer: The library's own, unwrapped.
    """

    model: DigitsModel
    optimizer: distlion.DistributedLion


class DigitsModel(nn.Module):
    """A classifier that notes the loss of each training batch, and how much it was evaluated on.

    Without biases: frameworks that give them a group of their own train it as all others do.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner, self.outer = nn.Linear(64, 16, bias=False), nn.Linear(16, 10, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 8)
        self.losses: list[float] = []
        self.evaluated = 0

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.outer(torch.tanh(self.inner(pixels)))
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            self.losses.append(float(loss.detach()))
        else:
            self.evaluated += len(labels)
        return {"loss": loss, "logits": logits}


class Digits(Dataset[dict[str, Tensor]]):
    """Handwritten digits by their numbers: ``{"pixels": (64,) float32, "labels": () int64}``."""

    def __init__(self, order: list[int], poisoned: set[int]) -> None:
        self.order, self.poisoned = order, poisoned
        self.pixels, self.labels = _load()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order[place]
        factor = float("nan") if index in self.poisoned else 1.0
        return {"pixels": self.pixels[index] * factor, "labels": self.labels[index]}


@functools.cache
def _load() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # for seconds

    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

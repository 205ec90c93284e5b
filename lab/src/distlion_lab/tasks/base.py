"""The interface of a training task: batches, a model, and one way to score them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """The examples of one forward pass.

    Args:
        inputs: Keyword arguments of the model's ``forward``; dim 0 of each tensor counts examples.
        targets: (...) int64 class of each prediction, in the shape of the logits without their last
            dim.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor


@dataclass(frozen=True)
class Score:
    """Sums over the predictions of a batch, so that batches add up exactly.

    Args:
        loss_sum: Cross entropy summed over predictions, in nats.
        correct: Number of predictions with the target as the most likely class.
        count: Number of predictions.
    """

    loss_sum: float
    correct: int
    count: int


class Task(Protocol):
    """A real training job: data sharded by rank, and a model with random weights."""

    @property
    def name(self) -> str:
        """Return the task's name on the command line."""

    @property
    def unit(self) -> str:
        """Return the unit of throughput: ``tokens`` or ``images``."""

    @property
    def units_per_batch(self) -> int:
        """Return the number of units that a worker sees in a step."""

    def build_model(self, *, seed: int) -> nn.Module:
        """Return a model with random weights that depend on ``seed`` alone."""

    def training_batch(self, *, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return the batch of one rank at one step, as a pure function of the arguments.

        Ranks draw from disjoint shards of the training data.
        """

    def heldout_batches(self) -> Sequence[Batch]:
        """Return the validation batches, the same at every call and for all settings of the run."""

    def describe(self) -> dict[str, str | int]:
        """Return facts about data and model for a record."""

    def sample(self, model: nn.Module, *, seed: int) -> dict[str, str]:
        """Return a sample of what a model writes: ``prompt``, ``model`` and ``data``.

        ``data`` is what follows the prompt in the data. Empty for tasks other than text.
        """


def seeded_generator(*parts: int) -> torch.Generator:
    """Make a generator from non-negative integers, such as seed, step and rank."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def digest_arrays(*arrays: npt.NDArray[Any]) -> str:
    """Return 16 digits of the SHA-256 of some arrays, to distinguish data sets."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross entropy of a batch, in nats per prediction.

    Returns:
        () float32, with a graph to the parameters.
    """
    logits = model(**batch.inputs).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), batch.targets.flatten())


def score_batch(model: nn.Module, batch: Batch) -> Score:
    """Score a batch without gradients; restore the model's training mode afterwards."""
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        logits = model(**batch.inputs).logits.flatten(0, -2).float()
    model.train(was_training)
    targets = batch.targets.flatten()
    return Score(
        loss_sum=float(nn.functional.cross_entropy(logits, targets, reduction="sum")),
        correct=int((logits.argmax(dim=-1) == targets).sum()),
        count=targets.numel(),
    )

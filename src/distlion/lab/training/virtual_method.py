"""Methods of a comparison as the virtual loop drives them, each with its account of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from distlion.aggregation import Aggregation
from distlion.exchange import AllReduce
from distlion.lab.baselines import VirtualBaseline
from distlion.lab.training.vote_names import LION_BETAS
from distlion.optim import MomentumSync
from distlion.virtual import VirtualCluster


class VirtualMethod(Protocol):
    """N workers that take turns with one model, then step together."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose learning rate a schedule sets."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that one worker would have sent in all steps so far."""

    @property
    def up_bits_per_parameter(self) -> float:
        """Return the bits from worker to server, for each parameter and step."""

    @property
    def down_bits_per_parameter(self) -> float:
        """Return the bits from server to worker, for each parameter and step."""

    @property
    def rounds(self) -> int:
        """Return how many messages of a step wait for each other."""

    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it."""

    def step(self) -> None:
        """Move the parameters."""


@dataclass(frozen=True)
class Entry:
    """What a contender is built from.

    Attributes:
        params: Names and trainable parameters of the model.
        lr, weight_decay: Of the optimizer.
        workers: N.
        steps: Of the whole run.
        seed: Of every draw.
    """

    params: Sequence[tuple[str, nn.Parameter]]
    lr: float
    weight_decay: float
    workers: int
    steps: int
    seed: int

    @property
    def n_elements(self) -> int:
        """Number of trainable elements."""
        return sum(param.numel() for _, param in self.params)


@dataclass(frozen=True)
class VirtualVoting:
    """Virtual workers that vote, under the pattern ``AllReduce``."""

    optimizer: VirtualCluster
    rounds: int

    @classmethod
    def build(
        cls,
        entry: Entry,
        aggregation: Aggregation,
        *,
        betas: tuple[float, float] = LION_BETAS,
        cautious: bool = False,
        momentum_sync: MomentumSync | None = None,
    ) -> VirtualVoting:
        """Build the workers of an entry that vote by a rule."""
        cluster = VirtualCluster(
            entry.params,
            entry.lr,
            betas,
            workers=entry.workers,
            weight_decay=entry.weight_decay,
            aggregation=aggregation,
            cautious=cautious,
            momentum_sync=momentum_sync,
            seed=entry.seed,
        )
        return cls(cluster, _count_rounds(entry, aggregation, syncs=momentum_sync is not None))

    @property
    def sent_bytes(self) -> int:
        return self.optimizer.traffic.sent_bytes

    @property
    def up_bits_per_parameter(self) -> float:
        return self.optimizer.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self.optimizer.down_bits_per_parameter

    def collect(self, worker: int) -> None:
        self.optimizer.collect(worker)

    def step(self) -> None:
        self.optimizer.step()


def _count_rounds(entry: Entry, aggregation: Aggregation, *, syncs: bool) -> int:
    """Count the rounds of a step; staggered momenta travel in an exchange of their own."""
    if entry.workers == 1:
        return 0
    shape = aggregation.shape_of(entry.n_elements, entry.workers)
    return AllReduce().rounds(shape) * (2 if syncs else 1)


@dataclass(frozen=True)
class VirtualAveraging:
    """Virtual workers whose gradients are averaged, compressed or not, for one optimizer."""

    baseline: VirtualBaseline
    rounds: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.baseline.optimizer

    @property
    def sent_bytes(self) -> int:
        return self.baseline.sent_bytes

    @property
    def up_bits_per_parameter(self) -> float:
        return self.baseline.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self.baseline.down_bits_per_parameter

    def collect(self, worker: int) -> None:
        self.baseline.collect(worker)

    def step(self) -> None:
        self.baseline.step()

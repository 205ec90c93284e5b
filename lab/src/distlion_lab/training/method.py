"""A way to train: how it builds workers, and its place in comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import nn

from distlion_lab.training.inner import LION_LR, LION_WEIGHT_DECAY
from distlion_lab.training.workers import MethodRun, RealWorker, VirtualWorkers, VoteOptions


class MethodKind(str, Enum):
    """The side of a method in a comparison."""

    OURS = "ours"
    BASELINE = "baseline"
    FULL_PRECISION = "full precision"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, with a name such as ``majority``.

    Attributes:
        name: Name on the command line.
        description: A phrase for reports.
        definition: A description to the last number; it identifies the method in records.
        kind: Side in a comparison.
        base_lr: Center of its grid of learning rates in a comparison.
        weight_decay: Default weight decay in a comparison.
        enter: Builds the virtual workers of a run.
        start: Builds this process's worker of a run; None for methods of comparisons only.
        votes: True if workers vote; False if they average.
        train_lr, train_weight_decay: Defaults for real workers.
    """

    name: str
    description: str
    definition: str
    kind: MethodKind
    base_lr: float
    weight_decay: float
    enter: Callable[[MethodRun], VirtualWorkers]
    start: Callable[[nn.Module, MethodRun, VoteOptions], RealWorker] | None = None
    votes: bool = False
    train_lr: float = LION_LR
    train_weight_decay: float = LION_WEIGHT_DECAY

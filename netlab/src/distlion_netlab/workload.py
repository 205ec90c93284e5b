"""Workloads of a sweep: a small GPT, an emulated accelerator, or the exchange of a bare vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from distlion.errors import InvalidArgumentError
from distlion_netlab.method_names import (
    ALL_REDUCE,
    BASELINES,
    FLOOR,
    find_period,
    is_baseline,
    parse_vote,
)


def check_trainers(names: Sequence[str]) -> None:
    """Check that each method can train a model.

    Raises:
        InvalidArgumentError: One cannot.
    """
    for name in names:
        if name not in (FLOOR, *BASELINES) and find_period(name) == 1:
            parse_vote(name)


@dataclass(frozen=True, kw_only=True)
class GptWorkload:
    """Training steps of a GPT-2 with random weights and tokens, without dropout.

    Args:
        layers, width, heads, vocabulary: Sizes of the model.
        batch_size: Sequences of a worker in a backward pass.
        context: Tokens of a sequence.
        backwards: Backward passes of a step, whose gradients are accumulated.
        ties_embeddings: Whether the input embedding is also the output layer, so that its gradient
            comes last.
        device: Where workers train. On "cuda", all workers share the first GPU, and forward passes
            run under autocast to bfloat16.
    """

    layers: int = 8
    width: int = 256
    heads: int = 4
    vocabulary: int = 4096
    batch_size: int = 2
    context: int = 64
    backwards: int = 1
    ties_embeddings: bool = False
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "int"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.width % self.heads:
            raise InvalidArgumentError(f"width {self.width} is no multiple of {self.heads} heads")

    def check_methods(self, names: Sequence[str]) -> None:
        """Check that each method can train a model.

        Raises:
            InvalidArgumentError: One cannot.
        """
        check_trainers(names)


@dataclass(frozen=True, kw_only=True)
class DeviceWorkload:
    """Training steps whose forward and backward pass run on an emulated accelerator.

    Each layer is a width x width matrix. Its forward pass takes ``step_s / (3 * layers)`` and its
    backward pass twice as long. The host sleeps meanwhile, so the machine's cores are free for
    communication, as on a host with an accelerator. Gradients are random numbers, drawn once. The
    arithmetic of Lion and of votes runs on the cores.

    Args:
        layers, width: Sizes of the model.
        step_s: Seconds of a forward and a backward pass together.
    """

    layers: int = 8
    width: int = 1024
    step_s: float = 0.3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "step_s" else 1
            if not least <= value < math.inf:
                raise InvalidArgumentError(f"{name} is {value}; expected {least} or more")

    def check_methods(self, names: Sequence[str]) -> None:
        """Check that each method can train a model.

        Raises:
            InvalidArgumentError: One cannot.
        """
        check_trainers(names)


@dataclass(frozen=True)
class VectorWorkload:
    """The exchange alone: optimizer steps for one parameter with a gradient that is set once.

    Args:
        n_elements: Length of the vector.
    """

    n_elements: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.n_elements < 1:
            raise InvalidArgumentError(f"n_elements is {self.n_elements}; expected 1 or more")

    def check_methods(self, names: Sequence[str]) -> None:
        """Check that each method can exchange a vector.

        Raises:
            InvalidArgumentError: One cannot.
        """
        for name in names:
            if name != ALL_REDUCE and (is_baseline(name) or parse_vote(name)["overlap"]):
                raise InvalidArgumentError(
                    f"method {name!r} cannot exchange a bare vector; expected {ALL_REDUCE} or "
                    "RULE-PATTERN"
                )


Workload = GptWorkload | DeviceWorkload | VectorWorkload

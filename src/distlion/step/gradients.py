"""Warnings about raw gradients: identical on all workers, or absent on all."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distlion.errors import (
    AbsentGradientsWarning,
    IdenticalGradientsWarning,
    UnusedParametersWarning,
)
from distlion.kernels.coin import mix
from distlion.kernels.contract import Segment
from distlion.kernels.reference import Kernels
from distlion.step.param import VotingParam
from distlion.wire.pattern import Reply

WATCHED_STEPS = 3
STEPS_OF_USE = 10
"""Steps within which each parameter should have had a gradient somewhere."""
NAMED_UNUSED = 5


def look_at_gradients(kernels: Kernels, segments: Sequence[Segment]) -> Tensor:
    """Digest each present raw gradient, and check whether any element is not 0.

    Returns:
        (2, n_present) int64, on the gradients' device.
    """
    grads = [segment.grad for segment in segments if segment.grad is not None]
    if not grads:
        return torch.zeros((2, 0), dtype=torch.int64, device="cpu")
    told = torch.stack([grad.count_nonzero() for grad in grads])
    return torch.stack([kernels.digests(grads), told])


def digest_gradients(segments: Sequence[Segment], seen: Tensor) -> int:
    """Digest a bucket's raw gradients, signed 64 bits; 0 where all are absent or 0.

    Args:
        segments: Segments of the bucket.
        seen: The result of ``look_at_gradients``, on the CPU.
    """
    own, are_told = seen.tolist()
    words = [segment.slot.first_word for segment in segments if segment.grad is not None]
    digest = 0
    for index, first_word in enumerate(words):
        if are_told[index]:
            digest = mix(digest + own[index] + first_word)
    return digest - (1 << 64) if digest >> 63 else digest


class GradientWatch:
    """Warn once of faults that no vote can fix: equal gradients on all workers, or none on any.

    Digests travel in the headers of votes, so that this needs no collective of its own.

    Attributes:
        steps_left: Steps whose digests are still wanted.
    """

    def __init__(self) -> None:
        self.steps_left = WATCHED_STEPS
        self._has_warned_of_absence = False

    def observe(self, replies: Sequence[Reply], params: Sequence[VotingParam]) -> None:
        """Examine a committed step.

        Args:
            replies: One reply for each bucket; none for a worker that is alone.
            params: This worker's parameters.
        """
        if replies and self.steps_left > 0:
            self._compare([reply.gradient_digests for reply in replies])
        has_votes = any(reply.present.any() for reply in replies)
        # Without votes, workers may have abstained, as gradients were not finite.
        if not has_votes and all(param.param.grad is None for param in params):
            self._warn_of_absence()

    def _warn_of_absence(self) -> None:
        if self._has_warned_of_absence:
            return
        self._has_warned_of_absence = True
        warn_user(
            "no worker has a gradient for any parameter, so that this step moved nothing. Was "
            "zero_grad() called between backward() and step(), or backward() never? Does the "
            "optimizer hold the parameters of another model object (a copy, or from before "
            "wrapping)? Under FSDP2, does set_requires_all_reduce(False) or "
            "set_requires_gradient_sync(False) keep gradients back?",
            AbsentGradientsWarning,
        )

    def _compare(self, digests: Sequence[Sequence[int]]) -> None:
        """Compare the digests of one step: for each bucket, one from every rank."""
        if not any(digests):  # a server's reply carries none: the server observes
            self.steps_left -= 1
            return
        telling = [set(bucket) for bucket in digests if any(bucket)]
        if not telling or any(len(values) > 1 for values in telling):
            self.steps_left = 0
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            warn_user(
                f"all workers had the same gradients in the first {WATCHED_STEPS} steps, so their "
                "votes say no more than one worker's. Either gradients are averaged before the "
                "vote, by DistributedDataParallel or a trainer that wraps the model in it: turn "
                "that off by distlion.integrations.ddp.disable_all_reduce(model); "
                'the documentation, "Your trainer", has the lines for the Hugging Face Trainer, '
                "Accelerate, Lightning and FSDP2. Or "
                "all ranks read the same data: give each rank its own part, for example by "
                "torch.utils.data.DistributedSampler.",
                IdenticalGradientsWarning,
            )


class UseWatch:
    """Warn once of parameters that had no gradient in the first steps.

    Args:
        where: Where gradients are looked for, such as "on any worker".

    Attributes:
        is_over: Whether no step is looked at any more.
    """

    def __init__(self, where: str) -> None:
        self.is_over = False
        self._where, self._steps = where, 0
        self._used: set[Tensor] = set()

    def observe(self, used: Collection[Tensor], named: Sequence[tuple[str, Tensor]]) -> None:
        """Examine a step.

        Args:
            used: Parameters that had a gradient.
            named: All parameters, with their names.
        """
        if self.is_over:
            return
        self._used.update(used)
        self._steps += 1
        if self._steps < STEPS_OF_USE:
            return
        trained = [(name, p) for name, p in named if p.requires_grad and p.numel()]
        # A gradient that was not finite is one that was not voted on.
        unused = [name for name, p in trained if p not in self._used and p.grad is None]
        has_use = bool(self._used)  # or AbsentGradientsWarning has told
        self.is_over, self._used = True, set()
        if unused and has_use:
            self._warn(unused, len(trained))

    def _warn(self, unused: Sequence[str], n_trained: int) -> None:
        more = len(unused) - NAMED_UNUSED
        listed = ", ".join(unused[:NAMED_UNUSED]) + (f" and {more} more" if more > 0 else "")
        warn_user(
            f"{len(unused)} of {n_trained} parameters had no gradient {self._where} in the first "
            f"{STEPS_OF_USE} steps: {listed}. If a layer was replaced after the optimizer was "
            "made, the new one is not trained: make the optimizer last. If they are used rarely or "
            "later, as experts are, all is well.",
            UnusedParametersWarning,
        )


_INSIDE = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)
"""Paths of frames outside user code: schedulers, profilers and decorators wrap ``step()``."""


def warn_user(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line up the stack that is neither distlion's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

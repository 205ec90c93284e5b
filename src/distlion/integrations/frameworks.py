"""What bridges to frameworks share: versions, optimizers that vote, and models that begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distlion.errors import CheckpointError, MissingDependencyError, UnsupportedTypeError
from distlion.optim import DistributedLion, LocalSteps


def check_version(package: str, *, major: int, extra: str) -> None:
    """Refuse a package that is missing, or has another major version.

    Args:
        package: As in a package registry.
        major: What its names were checked with.
        extra: Of distlion, which brings it.

    Raises:
        MissingDependencyError: It is, or has.
    """
    advice = f"pip install 'distlion[{extra}]'"
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingDependencyError(f"{package} is not installed: {advice}") from error
    if found.split(".")[0] != str(major):
        raise MissingDependencyError(
            f"{package} {found} is installed, and distlion works with {package} {major}: {advice}"
        )


Voter = DistributedLion | LocalSteps
"""An optimizer that votes, in each step or every few of them."""


def check_votes(optimizer: Any, where: str) -> Voter:
    """Return an optimizer that votes, out of what a framework wraps it in.

    Args:
        optimizer: What the user made.
        where: Who averages no gradients for it.

    Raises:
        UnsupportedTypeError: It does not vote: replicas would drift apart.
    """
    while not isinstance(optimizer, Voter):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise UnsupportedTypeError(
                f"the optimizer is a {type(optimizer).__name__}, which does not vote, and {where} "
                "averages no gradients, so that replicas would drift apart; make it a "
                "distlion.DistributedLion or a distlion.LocalSteps"
            )
        optimizer = inner
    return optimizer


def hold_back(voter: Voter) -> AbstractContextManager[None]:
    """Return a context in which no vote leaves during backward; local steps have none there."""
    return voter.no_sync() if isinstance(voter, DistributedLion) else nullcontext()


def vote_on_deltas(optimizers: Iterable[Any]) -> None:
    """Let workers with local steps vote out of turn, so that all have the same parameters.

    Frameworks save one model for all, and evaluate a part of the data on each worker. Every worker
    must call it.

    Args:
        optimizers: What votes; those that vote in each step are left alone.

    Raises:
        StepError, ProcessGroupError: As ``LocalSteps.vote``.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LocalSteps):
            optimizer.vote()


@contextmanager
def naming_what_is_loaded(framework: str) -> Iterator[None]:
    """Say in an error of a load that a framework had loaded the model before it.

    Args:
        framework: Its name.
    """
    try:
        yield
    except CheckpointError as error:
        error.args = (
            f"{error}. {framework} has loaded the model and its own state by now, and the "
            "optimizer is as it was. Make the model anew before it is trained",
        )
        raise


@torch.no_grad()
def broadcast_rest(model: nn.Module) -> None:
    """Copy buffers and frozen parameters from rank 0, as DistributedDataParallel does at first.

    Parameters that are trained are copied when the optimizer is made.
    """
    if not dist.is_initialized():
        return
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.requires_grad and tensor.numel():
            values = tensor.contiguous()
            dist.broadcast(values, 0)
            tensor.copy_(values)

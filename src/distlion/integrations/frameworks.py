"""What bridges to frameworks share: versions, optimizers that vote, and models that begin alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def check_votes(optimizer: Any, where: str) -> DistributedLion:
    """Return an optimizer that votes, out of what a framework wraps it in.

    Args:
        optimizer: What the user made.
        where: Who averages no gradients for it.

    Raises:
        UnsupportedTypeError: It does not vote: replicas would drift apart.
    """
    while not isinstance(optimizer, DistributedLion):
        refuse_local_steps(optimizer)
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise UnsupportedTypeError(
                f"the optimizer is a {type(optimizer).__name__}, which does not vote, and {where} "
                "averages no gradients, so that replicas would drift apart; make it a "
                "distlion.DistributedLion"
            )
        optimizer = inner
    return optimizer


def refuse_local_steps(optimizer: object) -> None:
    """Refuse an optimizer whose workers differ between votes: frameworks save one model for all.

    Raises:
        UnsupportedTypeError: It is such an optimizer.
    """
    if isinstance(optimizer, LocalSteps):
        raise UnsupportedTypeError(
            "LocalSteps is not supported in this trainer yet. Expected a "
            "distlion.DistributedLion. Use that, or LocalSteps in a training loop of your own"
        )


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

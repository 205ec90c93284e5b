"""Common parts of bridges: package versions, optimizers that vote, equal initial models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlion.crew.retry import RetryingLion
from distlion.errors import CheckpointError, MissingDependencyError, UnsupportedTypeError
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import expect_all_saved
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.param import list_plain, view_row


def check_version(package: str, *, major: int, extra: str) -> None:
    """Refuse a package that is missing, or has another major version.

    Args:
        package: Name in a package registry.
        major: Major version with which the bridge was tested.
        extra: Extra of distlion that installs it.

    Raises:
        MissingDependencyError: The package is missing, or has another major version.
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
"""An optimizer that votes, in each step or every few steps."""


def check_votes(optimizer: Any, where: str) -> Voter:
    """Return an optimizer that votes, without its framework's wrapper.

    Args:
        optimizer: The user's optimizer.
        where: Name of the bridge, which averages no gradients.

    Raises:
        UnsupportedTypeError: It does not vote: replicas would diverge.
    """
    found: Voter = _find_inside(
        optimizer,
        Voter,
        f"which does not vote, and {where} averages no gradients, so replicas would diverge; make "
        "it a distlion.DistributedLion or a distlion.LocalSteps",
    )
    return found


def check_retries(optimizer: Any) -> RetryingLion:
    """Return a crew's optimizer, without its framework's wrapper.

    Raises:
        UnsupportedTypeError: It is no crew's, or does not try its steps again.
    """
    found: RetryingLion = _find_inside(
        optimizer,
        RetryingLion,
        "and this trainer ignores what step() returns where members of a crew change; give it "
        "crew.optimizer(..., retry=True)",
    )
    return found


def _find_inside(optimizer: Any, kind: Any, problem: str) -> Any:
    """Return the optimizer of a kind inside of frameworks' wrappers; say the problem without it."""
    while not isinstance(optimizer, kind):
        if not hasattr(optimizer, "optimizer"):
            name = type(optimizer).__name__
            raise UnsupportedTypeError(f"the optimizer is a {name}, {problem}")
        optimizer = optimizer.optimizer
    return optimizer


def save_for_all(voter: Voter) -> Voter:
    """Note that a bridge saves every worker's state, and return the optimizer."""
    expect_all_saved(voter.outer_optimizer if isinstance(voter, LocalSteps) else voter)
    return voter


def hold_back(voter: Voter) -> AbstractContextManager[None]:
    """Return a context without votes during backward; local steps never vote there."""
    return voter.no_sync() if isinstance(voter, DistributedLion) else nullcontext()


def share_parameters(one: Voter, other: Voter) -> bool:
    """Return whether two optimizers have a parameter in common, as where one replaces the other."""
    held = {param for group in one.param_groups for param in group["params"]}
    return any(param in held for group in other.param_groups for param in group["params"])


def vote_on_deltas(optimizers: Iterable[Any]) -> None:
    """Let workers with local steps vote now, so that all have the same parameters.

    Frameworks save one model for all, and evaluate a part of the data on each worker. Every worker
    must call it.

    Args:
        optimizers: Optimizers; those that vote in each step are skipped.

    Raises:
        StepError, ProcessGroupError: As in ``LocalSteps.vote``.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LocalSteps):
            optimizer.vote()


def begin_at_loaded(optimizers: Iterable[Any]) -> None:
    """Let workers with local steps go on from weights that all of them have loaded alike.

    Args:
        optimizers: Optimizers; those that vote in each step are skipped.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LocalSteps):
            optimizer._votes.begin_at_own()


def refuse_between_votes(optimizers: Iterable[Any], *, call: str) -> None:
    """Refuse to save one model for all while workers with local steps have different ones.

    Args:
        optimizers: Optimizers; those that vote in each step are skipped.
        call: The call by which workers vote now.

    Raises:
        CheckpointError: This worker has taken local steps since the last vote.
    """
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, LocalSteps) and optimizer.steps_since_vote:
            raise CheckpointError(
                f"save_model: optimizer {number} has taken {optimizer.steps_since_vote} local "
                "steps since the last vote, so every worker has other parameters; call "
                f"{call} on all processes, then save"
            )


def compare_at_end(optimizers: Iterable[Any]) -> None:
    """Compare replicas at the end of a run; every worker must call it.

    Args:
        optimizers: Optimizers; those with ``Replicas(check_every=None)`` are skipped, as in their
            steps.

    Raises:
        ReplicaMismatchError: Replicas differ; on every rank.
        ConfigMismatchError: Another worker is at a different call; on every rank.
    """
    for optimizer in optimizers:
        votes = optimizer.outer_optimizer if isinstance(optimizer, LocalSteps) else optimizer
        if votes.settings.replicas.check_every is not None:
            optimizer.verify_replicas()


@contextmanager
def naming_what_is_loaded(framework: str) -> Iterator[None]:
    """Add to an error of a load that the framework had already loaded the model.

    Args:
        framework: Name of the framework.
    """
    try:
        yield
    except CheckpointError as error:
        error.args = (
            f"{error}. {framework} has already loaded the model and its own state, and the "
            "optimizer is unchanged. Rebuild the model before training",
        )
        raise


def broadcast_rest(model: nn.Module) -> None:
    """Copy buffers and frozen parameters from rank 0, as DistributedDataParallel does initially.

    The optimizer's constructor copies the trained parameters.
    """
    frozen = (param for param in model.parameters() if not param.requires_grad)
    broadcast_tensors(chain(frozen, model.buffers()))


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy tensors from rank 0 to all ranks; every rank must call it with the same ones."""
    if not dist.is_initialized():
        return
    for tensor in (plain for each in tensors for plain in list_plain(each)):
        if tensor.numel():
            # As bytes: Gloo and NCCL know fewer dtypes than torch.
            values = view_row(tensor.contiguous(), torch.uint8)
            dist.broadcast(values, 0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values.view(tensor.dtype).view(tensor.shape))

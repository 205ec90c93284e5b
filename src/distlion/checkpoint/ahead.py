"""The check, at the start of a run, of the folder that it will save in."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.contents import describe_layout, digest_layout
from distlion.checkpoint.identity import agree_on_identity, check_owner, list_loaded
from distlion.checkpoint.local import take_apart
from distlion.checkpoint.save import finish_pending, ownership_of
from distlion.errors import CheckpointError
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase

CALL = "check_checkpoint_folder()"


def check_checkpoint_folder(
    path: str | os.PathLike[str], model: nn.Module, optimizer: VotingBase | LocalSteps
) -> None:
    """Raise now what the first ``save_checkpoint`` into a folder would raise; write nothing.

    Every worker must call it, with what it will save: before the first step, and after
    ``load_checkpoint`` if the run resumes.

    Args:
        path: The folder of the run's checkpoints; it may be missing.
        model: The model to save.
        optimizer: The optimizer to save.

    Raises:
        CheckpointError: On some worker the folder belongs to another optimizer or an earlier run,
            or cannot be written; on every rank.
        ConfigMismatchError: Another worker is at a different call; on every rank.
        UnsupportedTypeError: The optimizer is of a wrong kind.

    Example:
        >>> distlion.check_checkpoint_folder("runs/first", model, optimizer)
    """
    votes, _ = take_apart(optimizer)
    ownership = ownership_of(votes)
    finish_pending(votes)
    with ownership.meeting(CALL):
        ownership.agree(CALL, None)
        barrier = CheckpointBarrier(
            ownership.open_channel(False), process=ownership.process, call=CALL
        )
        identity = agree_on_identity(barrier, votes)
        _, problem = attempt(
            lambda: _check_folder(
                Path(path),
                frozenset({identity, *list_loaded(votes)}),
                digest_layout(describe_layout(model, votes)),
            )
        )
        barrier.share(problem)


def _check_folder(root: Path, identities: frozenset[str], layout: str) -> None:
    present = next(each for each in (root, *root.absolute().parents) if os.path.lexists(each))
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{root} cannot be written: {present} is no folder, or is not writable. Expected a "
            "folder for checkpoints. Choose another one, or change its permissions"
        )
    check_owner(root, identities, layout)

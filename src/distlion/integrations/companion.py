"""Momenta of all workers in a folder beside the one file that a framework writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from distlion.checkpoint import WorldChange, load_checkpoint, save_checkpoint
from distlion.errors import CheckpointError
from distlion.optim import DistributedLion

KEY = "distlion"
"""In the framework's file: for each optimizer, the checkpoint that belongs to it."""

_KEPT = 2
"""A file that a crash keeps from being replaced still has its own."""


def name_companion(path: str | os.PathLike[str]) -> Path:
    """Name the folder that belongs to a file; a link has that of the file it leads to.

    Raises:
        CheckpointError: The file is not on a file system.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(
            f"{path}: every worker's momentum is saved in a folder beside the checkpoint, which "
            "must be on a file system"
        )
    real = Path(os.path.realpath(path))
    return real.with_name(f"{real.name}.{KEY}")


def save_votes(
    checkpoint: dict[str, Any],
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[Any, DistributedLion],
) -> None:
    """Save every worker's momentum, and note in a framework's checkpoint where it is.

    Args:
        checkpoint: What the framework is going to save, the model included. Gets an entry.
        path: Its file.
        model: Whose trained parameters the optimizers have.
        optimizers: By names that they keep.

    Raises:
        CheckpointError: Some worker cannot write; on every rank.
    """
    folder, names = name_companion(path), {}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        # The framework replaces its file, whichever run has written it.
        pending = save_checkpoint(
            folder / str(number),
            model,
            optimizer,
            keep_last=_KEPT,
            only_trained=True,
            overwrite=True,
        )
        names[name] = f"{number}/{pending.wait().name}"
    checkpoint[KEY] = names


def load_votes(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[Any, DistributedLion],
    *,
    on_world_change: WorldChange,
) -> None:
    """Load every worker's momentum, once the framework has loaded the model.

    Args:
        checkpoint: What the framework has loaded.
        path: Its file.
        model: As it was saved.
        optimizers: By the names under which they were saved.
        on_world_change: As of ``distlion.load_checkpoint``.

    Raises:
        CheckpointError: On some worker they are missing, or do not fit; on every rank.
    """
    names = checkpoint.get(KEY)
    if not isinstance(names, Mapping) or names.keys() != optimizers.keys():
        raise CheckpointError(
            f"{path} does not say where the momenta of all workers are, as a checkpoint does that "
            "was saved under a VotingStrategy with the same optimizers; the file alone has those "
            "of rank 0"
        )
    folder = name_companion(path)
    for name, optimizer in optimizers.items():
        load_checkpoint(
            folder / str(names[name]), model, optimizer, on_world_change=on_world_change
        )

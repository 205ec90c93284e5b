"""Momenta of all workers in a folder beside the one file that a framework writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from distlion.checkpoint import prune_checkpoints, save_checkpoint
from distlion.errors import CheckpointError
from distlion.integrations.frameworks import Voter

KEY = "distlion"
"""In the framework's file: for each optimizer, the checkpoint that belongs to it."""

_KEPT = 2
"""The newest, and the one before it: a file may still be written in the background."""


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


@contextmanager
def saving_votes(
    checkpoint: dict[str, Any],
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[Any, Voter],
    *,
    barrier: Callable[[], object],
) -> Iterator[None]:
    """Save every worker's momentum, before the framework writes the file that names it.

    Earlier ones are removed once the file is written: until then, the file that it replaces names
    one of them. A file that could not be written removes none.

    Args:
        checkpoint: What the framework is going to save, the model included. Gets an entry.
        path: Its file.
        model: Whose trained parameters the optimizers have.
        optimizers: By names that they keep.
        barrier: Waits for all ranks, of which one writes the file.

    Raises:
        CheckpointError: Some worker cannot write; on every rank.
    """
    folder, saved = name_companion(path), {}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        # The framework replaces its file, whichever run has written it.
        pending = save_checkpoint(
            folder / str(number), model, optimizer, only_trained=True, overwrite=True
        )
        saved[name] = pending.wait()
    checkpoint[KEY] = {name: f"{own.parent.name}/{own.name}" for name, own in saved.items()}
    yield
    barrier()
    for name, own in saved.items():
        prune_checkpoints(own, optimizers[name], keep_last=_KEPT)


def find_votes(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[Any, Path]:
    """Return the folder of each optimizer's checkpoint, by the name under which it was saved.

    Args:
        checkpoint: What the framework has read.
        path: Its file.

    Raises:
        CheckpointError: It does not say where they are.
    """
    names = checkpoint.get(KEY)
    if not isinstance(names, Mapping):
        raise CheckpointError(
            f"{path} does not say where the momenta of all workers are, as a checkpoint does that "
            "was saved under a VotingStrategy; the file alone has those of rank 0"
        )
    folder = name_companion(path)
    return {name: folder / str(place) for name, place in names.items()}


def check_names(folders: Mapping[Any, Path], optimizers: Mapping[Any, Voter]) -> None:
    """Refuse the checkpoints of other optimizers.

    Raises:
        CheckpointError: They were saved under other names.
    """
    if folders.keys() != optimizers.keys():
        raise CheckpointError(
            f"the checkpoint holds the momenta of the optimizers {list(folders)}, and those to be "
            f"loaded are {list(optimizers)}; load with the same optimizers"
        )

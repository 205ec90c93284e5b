"""Momenta of all workers, in a folder beside the single file of a framework."""

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
"""Key in the framework's file, for the checkpoint of each optimizer."""

_KEPT = 2
"""Number of kept checkpoints: the newest, and one before it while a file is still written."""


def name_companion(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a file's momenta; a link has its target's folder.

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

    Earlier momenta are removed once the file is written: until then, the file that it replaces
    names some of them. If the file cannot be written, none are removed.

    Args:
        checkpoint: The framework's data to save, with the model. An entry is added.
        path: The framework's file.
        model: Model with the optimizers' trained parameters.
        optimizers: Optimizers by names that never change.
        barrier: Function that waits for all ranks; one of them writes the file.

    Raises:
        CheckpointError: A worker cannot write; raised on every rank.
    """
    folder, saved = name_companion(path), {}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        # The framework replaces its file, even another run's.
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
        checkpoint: The framework's data as read.
        path: The framework's file.

    Raises:
        CheckpointError: The data do not name the folders.
    """
    names = checkpoint.get(KEY)
    if not isinstance(names, Mapping):
        raise CheckpointError(
            f"{path} does not name the folder with the momenta of all workers, as a checkpoint "
            "saved under a VotingStrategy does; the file alone has at most rank 0's momenta. To "
            "begin with its weights, load them into the model, without the optimizer"
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

"""Inspection of a checkpoint without loading it."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlion.checkpoint.folder import Manifest, find_checkpoint, read_manifest
from distlion.checkpoint.tensor_file import TensorFile, check_file
from distlion.checkpoint.tree import TREE, decode_tree
from distlion.errors import CheckpointError, UnsupportedTypeError
from distlion.numpy_numbers import as_python


@dataclass(frozen=True)
class CheckpointReport:
    """The findings on a checkpoint.

    Attributes:
        folder: The checkpoint's folder.
        manifest: Its manifest.
        problems: One line for each file that is missing or damaged; empty for an intact one.
        damaged: Names of these files, in the same order.
    """

    folder: Path
    manifest: Manifest
    problems: tuple[str, ...]
    damaged: tuple[str, ...]


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Compare every file of a checkpoint with its size and SHA-256.

    Args:
        path: The folder of a run's checkpoints, for the latest, or the folder of one checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or its manifest is damaged.
    """
    folder, manifest = inspect_checkpoint(path)
    problems = {}
    for name, record in manifest.files.items():
        try:
            check_file(folder / name, record)
        except CheckpointError as error:
            problems[name] = str(error)
    return CheckpointReport(folder, manifest, tuple(problems.values()), tuple(problems))


def inspect_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return a checkpoint's folder and manifest, without reading its other files.

    Raises:
        CheckpointError: There is none, or its manifest is damaged.
    """
    folder = find_checkpoint(Path(path))
    return folder, read_manifest(folder)


def read_extra(path: str | os.PathLike[str], *, process: int | None = None) -> Any:
    """Return the ``extra`` that a process gave to ``save_checkpoint``, without loading anything.

    No model or optimizer is needed, so it may hold the arguments that make them. Any one process
    may call it.

    Args:
        path: The folder of a run's checkpoints, for the latest, or the folder of one checkpoint.
        process: The process that saved it: the worker's rank, or 0 for ``VirtualCluster``. None:
            the one with this process's rank, or the first one, whose file is in this folder.

    Raises:
        UnsupportedTypeError: ``process`` is not an integer.
        CheckpointError: There is no checkpoint or no such process, or its file is damaged.

    Example:
        >>> config = distlion.checkpoint.read_extra("runs/first")["config"]
        >>> model = make_model(config)
    """
    folder, manifest = inspect_checkpoint(path)
    process = as_python(process)
    if process is None:
        process = _find_present(folder, manifest)
    if not isinstance(process, int):
        raise UnsupportedTypeError(f"process={process!r}: expected an integer, or None")
    name = _name_file(process)
    if name not in manifest.files:
        raise CheckpointError(
            f"{folder} was saved by processes 0 to {manifest.processes - 1}; got process={process}"
        )
    check_file(folder / name, manifest.files[name])
    with ExitStack() as stack:
        file = TensorFile(folder / name, stack)
        try:
            tree = json.loads(bytes(file.read(TREE).numpy()))
            return decode_tree(tree["extra"], file.take)
        except CheckpointError:
            raise
        # Forged values can raise any error.
        except Exception as error:
            raise CheckpointError(f"{file.path} is malformed ({error!r})") from error


def _name_file(process: int) -> str:
    return f"process-{process:05d}.safetensors"


def _find_present(folder: Path, manifest: Manifest) -> int:
    """Return the process whose file to read: hosts may keep those of their own workers alone."""
    own = int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0
    wanted = [own, *range(manifest.processes)]
    return next((each for each in wanted if (folder / _name_file(each)).is_file()), own)

"""Inspection of a checkpoint without loading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distlion.checkpoint.folder import find_checkpoint
from distlion.checkpoint.manifest import Manifest, read_manifest
from distlion.checkpoint.tensor_file import check_file
from distlion.errors import CheckpointError


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

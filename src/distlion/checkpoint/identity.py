"""The owner of a folder of checkpoints, and the optimizers that may continue it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from distlion.checkpoint.folder import find_checkpoint, list_complete
from distlion.checkpoint.manifest import Manifest, read_manifest
from distlion.errors import CheckpointError
from distlion.optim import VotingBase

_own: weakref.WeakKeyDictionary[VotingBase, str] = weakref.WeakKeyDictionary()
_loaded: weakref.WeakKeyDictionary[VotingBase, frozenset[str]] = weakref.WeakKeyDictionary()


def identify(optimizer: VotingBase) -> str:
    """Return an optimizer's identity: 32 hex digits, drawn when it is first asked for.

    Each process draws one; the first process's counts for all of them.
    """
    return _own.setdefault(optimizer, os.urandom(16).hex())


def list_loaded(optimizer: VotingBase) -> frozenset[str]:
    """Return the identities that an optimizer may continue, because it loaded their checkpoints.

    It saves under its own identity, so that of several optimizers that loaded one checkpoint only
    one continues in the folder.
    """
    return _loaded.get(optimizer, frozenset())


def note_loaded(optimizer: VotingBase, identities: frozenset[str]) -> None:
    """Set the result of ``list_loaded``; "" stands for checkpoints of format 1, without owner."""
    _loaded[optimizer] = identities - {""}


def read_newest(root: Path) -> Manifest | None:
    """Return the newest readable manifest of a folder; None where there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, but none has a readable manifest.
    """
    names = list_complete(root) if root.is_dir() else []
    found: list[Path] = [root / name for name in reversed(names)]
    try:
        found.insert(0, find_checkpoint(root))
    except CheckpointError:  # no pointer, or a damaged one: look at the numbers of steps
        pass
    for folder in found:
        try:
            return read_manifest(folder)
        except CheckpointError as error:
            problem = error
    if not found:
        return None
    raise CheckpointError(
        f"{root} holds checkpoints, and their owner is unknown ({problem}). Choose another "
        "folder, or give overwrite=True to take this one over"
    )

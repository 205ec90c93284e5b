"""Which optimizer a folder of checkpoints belongs to, and who may go on from there."""

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

    Processes draw their own; that of the first one counts for all of them.
    """
    return _own.setdefault(optimizer, os.urandom(16).hex())


def list_loaded(optimizer: VotingBase) -> frozenset[str]:
    """Return the identities after which an optimizer may go on, since it has loaded from there.

    What it saves has its own identity, so that of several that loaded one checkpoint only one goes
    on in the folder.
    """
    return _loaded.get(optimizer, frozenset())


def note_loaded(optimizer: VotingBase, identities: frozenset[str]) -> None:
    """Set what ``list_loaded`` returns; "" stands for checkpoints of format 1, of nobody."""
    _loaded[optimizer] = identities - {""}


def read_newest(root: Path) -> Manifest | None:
    """Return the newest manifest of a folder that can be read; None where there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and no manifest of them can be read.
    """
    names = list_complete(root) if root.is_dir() else []
    found: list[Path] = [root / name for name in reversed(names)]
    try:
        found.insert(0, find_checkpoint(root))
    except CheckpointError:  # no pointer, or a damaged one: the numbers of steps tell
        pass
    for folder in found:
        try:
            return read_manifest(folder)
        except CheckpointError as error:
            problem = error
    if not found:
        return None
    raise CheckpointError(
        f"{root} holds checkpoints, and it cannot be told whose they are ({problem}). Choose "
        "another folder, or give overwrite=True to take this one over"
    )

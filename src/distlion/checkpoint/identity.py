"""The owner of a folder of checkpoints, and the optimizers that may continue it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from pathlib import Path

from distlion.checkpoint.barrier import CheckpointBarrier
from distlion.checkpoint.folder import Manifest, find_checkpoint, list_complete, read_manifest
from distlion.errors import CheckpointError
from distlion.optim.base import VotingBase

_own: weakref.WeakKeyDictionary[VotingBase, str] = weakref.WeakKeyDictionary()
_loaded: weakref.WeakKeyDictionary[VotingBase, frozenset[str]] = weakref.WeakKeyDictionary()


def identify(optimizer: VotingBase) -> str:
    """Return an optimizer's identity: 32 hex digits, drawn when it is first asked for."""
    return _own.setdefault(optimizer, os.urandom(16).hex())


def agree_on_identity(barrier: CheckpointBarrier, optimizer: VotingBase) -> str:
    """Return the first process's identity of an optimizer, which all processes keep.

    In a crew the first process may be lost, and another one saves in its place.
    """
    _own[optimizer] = barrier.share(None, identity=identify(optimizer))[0]["identity"]
    return _own[optimizer]


def hand_on_identities(optimizer: VotingBase) -> list[str]:
    """Return an optimizer's identity, then those that it may continue, for a newcomer."""
    return [identify(optimizer), *sorted(list_loaded(optimizer))]


def take_identities(optimizer: VotingBase, identities: list[str]) -> None:
    """Take what ``hand_on_identities`` has returned on another worker of the crew."""
    _own[optimizer] = identities[0]
    note_loaded(optimizer, frozenset(identities[1:]))


def list_loaded(optimizer: VotingBase) -> frozenset[str]:
    """Return the identities that an optimizer may continue, because it loaded their checkpoints.

    It saves under its own identity, so that of several optimizers that loaded one checkpoint only
    one continues in the folder.
    """
    return _loaded.get(optimizer, frozenset())


def note_loaded(optimizer: VotingBase, identities: frozenset[str]) -> None:
    """Set the result of ``list_loaded``; "" stands for checkpoints of format 1, without owner."""
    _loaded[optimizer] = identities - {""}


def check_owner(root: Path, identities: Collection[str], layout: str) -> None:
    """Refuse a folder that holds another optimizer's checkpoints.

    Saving would prune them, and the latest could be either optimizer's.

    Args:
        root: The folder of a run's checkpoints.
        identities: The optimizer's own identity, and those that it may continue.
        layout: Digest of its parameters, which decides for checkpoints without an identity.

    Raises:
        CheckpointError: The folder is another optimizer's.
    """
    earlier = read_newest(root)
    if earlier is None:
        return
    # Format 1 has no identity.
    is_own = earlier.identity in identities if earlier.identity else earlier.layout == layout
    if not is_own:
        raise CheckpointError(
            f"{root} was saved from another optimizer, or by an earlier run. Expected a "
            "folder of its own for each optimizer. Call load_checkpoint before to go on from "
            "there, choose another folder, or give overwrite=True to take this one over"
        )


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

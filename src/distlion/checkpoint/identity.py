"""Which optimizer a folder of checkpoints belongs to: a number that is drawn once and saved."""

from __future__ import annotations

import os
import weakref

from distlion.optim import VotingBase

_known: weakref.WeakKeyDictionary[VotingBase, str] = weakref.WeakKeyDictionary()


def identify(optimizer: VotingBase) -> str:
    """Return an optimizer's identity: 32 hex digits, drawn when it is first asked for.

    Processes draw their own; that of the first one counts for all of them.
    """
    return _known.setdefault(optimizer, os.urandom(16).hex())


def adopt(optimizer: VotingBase, identity: str) -> None:
    """Let an optimizer go on as the one whose checkpoint it has loaded.

    Args:
        optimizer: Which has loaded it.
        identity: Of the checkpoint; "" in those of format 1, which belong to anybody.
    """
    if identity:
        _known[optimizer] = identity

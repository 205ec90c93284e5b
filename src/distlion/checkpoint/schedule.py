"""Which states a scheduler takes over from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distlion.errors import CheckpointError


def check_schedule(folder: Path, saved: Any, scheduler: Any) -> None:
    """Check that a saved state sets nothing of a scheduler that is no part of its state.

    Raises:
        CheckpointError: There is none, or it would replace a method, or the optimizer.
    """
    if saved is None:
        raise CheckpointError(f"{folder} holds no scheduler's state; give scheduler=None")
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"{folder} holds a {type(saved).__name__} as the scheduler's state; expected a dict"
        )
    present = scheduler.state_dict()
    wrong = [key for key in saved if key not in present and hasattr(scheduler, str(key))]
    if wrong:
        raise CheckpointError(
            f"{folder} would replace the scheduler's {str(wrong[0])[:80]!r}, which is no part of "
            "its state; expected what state_dict() returns"
        )

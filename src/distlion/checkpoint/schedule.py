"""Check of a scheduler's state in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distlion.errors import CheckpointError

_PLAIN = (int, float, str, list, tuple, Mapping, type(None))


def check_schedule(folder: Path, saved: Any, scheduler: Any) -> None:
    """Check that a saved state changes only the state of a scheduler.

    Raises:
        CheckpointError: There is none, or it would replace a method or the optimizer.
    """
    if saved is None:
        raise CheckpointError(f"{folder} holds no scheduler's state; give scheduler=None")
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"{folder} holds a {type(saved).__name__} as the scheduler's state; expected a dict"
        )
    present = scheduler.state_dict()
    wrong = [
        key
        for key in saved
        if key not in present and not isinstance(getattr(scheduler, str(key), None), _PLAIN)
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} would replace the scheduler's {str(wrong[0])[:80]!r}, which is not part of "
            "its state; expected what state_dict() returns"
        )
    for key in present.keys() & saved.keys():
        now, then = present[key], saved[key]
        if now is not None and then is not None and not _is_alike(now, then):
            raise CheckpointError(
                f"{folder} holds {str(then)[:80]!r} as the scheduler's {key!r}; expected a value "
                f"like {str(now)[:80]!r}"
            )


def _is_alike(now: Any, then: Any) -> bool:
    """Return whether both are numbers, both lists of alike items, or both dicts."""
    if _is_number(now):
        return _is_number(then)
    if isinstance(now, list | tuple):
        if not isinstance(then, list | tuple):
            return False
        # Lengths may differ, as of milestones: each must be like the first one.
        alike = now if len(now) == len(then) else now[:1] * len(then)
        return all(map(_is_alike, alike, then))
    return isinstance(then, Mapping) if isinstance(now, Mapping) else True


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one, as a learning rate may be."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)

"""Warnings that show the user's line, whatever wraps ``step()`` in between."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    contextlib.__file__,
)
"""Where frames are no user's: schedulers, profilers, compilers and decorators wrap ``step()``."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the nearest line up the stack that is neither ours nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

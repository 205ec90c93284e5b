"""Named selections of what to compare, and how to make any of them quick."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from distlion.training.settings import TaskName


class Preset(str, Enum):
    """A comparison that a paper made."""

    PAPER = "paper"
    LION_CUB = "lion-cub"


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # Figures 2 to 4 of arXiv:2404.00438. TernGrad and GradDrop have AdamW, under which they came
    # further on a ViT than under SGD.
    Preset.PAPER: {
        "methods": (
            "majority",
            "average",
            "signum",
            "global-lion",
            "global-adamw",
            "terngrad-adamw",
            "graddrop-adamw",
            "dgc",
        ),
        "workers": (4, 8, 16, 32),
    },
    # The parts of arXiv:2411.16462, one by one.
    Preset.LION_CUB: {
        "methods": (
            "majority",
            "majority-zero",
            "quantized-2",
            "quantized-4",
            "quantized-8",
            "quantized-2-linf",
            "quantized-4-linf",
            "majority-sync-100",
            "lion-cub",
            "average",
            "global-lion",
        ),
        "workers": (4, 8),
    },
}
"""Settings of ``CompareSettings``."""

_QUICK_TASKS: Mapping[TaskName, Mapping[str, Any]] = {
    TaskName.IMAGES: {"steps": 60, "batch_size": 16},
    TaskName.TEXT: {"steps": 60, "batch_size": 2},
}
_QUICK: Mapping[str, Any] = {"workers": (4, 8), "seeds": 2}


def make_quick(task: TaskName) -> dict[str, Any]:
    """Return settings with which a preset takes minutes on two cores and on embedded data."""
    return {**_QUICK, **_QUICK_TASKS[task]}

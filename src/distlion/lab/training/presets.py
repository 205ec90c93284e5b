"""Named selections of what to compare, and how to make any of them quick."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from distlion.lab.training.train_settings import TaskName


class Preset(str, Enum):
    """A comparison that a paper made."""

    PAPER = "paper"
    LION_CUB = "lion-cub"


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # Figures 2 to 4 of arXiv:2404.00438. TernGrad and GradDrop have AdamW, under which they came
    # further on a ViT than under SGD; DGC's momentum is its own, and SGD is what it is measured by.
    Preset.PAPER: {
        "methods": (
            "majority",
            "average",
            "signum",
            "global-lion",
            "global-adamw",
            "terngrad-adamw",
            "graddrop-adamw",
            "global-sgd",
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

_HERE = Path(__file__).parent
# Small enough for 60 steps to lead somewhere: with 8 workers 87 to 90 % of the digits.
_MODELS = {TaskName.IMAGES: _HERE / "quick_vit.json", TaskName.TEXT: _HERE / "quick_gpt.json"}
# In runs of 80 steps all methods but one chose the highest of three rates without it.
_SMALL_MODEL_LR_SCALE = 3.0
_BATCH_SIZES = {TaskName.IMAGES: 16, TaskName.TEXT: 4}
_QUICK: Mapping[str, Any] = {"workers": (2, 4, 8), "seeds": 2}
_STEPS = 60


def make_quick(
    task: TaskName, *, embedded: bool = True, steps: int | None = None
) -> dict[str, Any]:
    """Return settings with which a preset takes minutes on two cores.

    Args:
        task: What is trained.
        embedded: Whether on the task's embedded data. They bring a small model and its learning
            rates too; the model would not fit other data.
        steps: Of a reported run, if that was chosen; learning rates are tuned by half as many.
    """
    steps = _STEPS if steps is None else steps
    settings = {**_QUICK, "steps": steps, "tuning_steps": max(1, steps // 2)}
    model = {"model_config": _MODELS[task], "lr_scale": _SMALL_MODEL_LR_SCALE}
    return {**settings, "batch_size": _BATCH_SIZES[task], **(model if embedded else {})}

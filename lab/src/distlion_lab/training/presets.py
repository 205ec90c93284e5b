"""Named selections of methods to compare, and quick versions of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from distlion_lab.training.train_settings import TaskName


class Preset(str, Enum):
    """A comparison from a paper."""

    PAPER = "paper"
    LION_CUB = "lion-cub"


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # Figures 2 to 4 of arXiv:2404.00438. TernGrad and GradDrop have AdamW, with which they came
    # further on a ViT than with SGD. DGC has its own momentum, and its reference is SGD.
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
# Small enough to learn in 60 steps: 87 to 90 % accuracy on the digits with 8 workers.
_MODELS = {TaskName.IMAGES: _HERE / "quick_vit.json", TaskName.TEXT: _HERE / "quick_gpt.json"}
# Without this scale, all methods but one chose the highest of three rates in runs of 80 steps.
_SMALL_MODEL_LR_SCALE = 3.0
_BATCH_SIZES = {TaskName.IMAGES: 16, TaskName.TEXT: 4}
_QUICK: Mapping[str, Any] = {"workers": (2, 4, 8), "seeds": 2}
_STEPS = 60


def make_quick(
    task: TaskName, *, embedded: bool = True, steps: int | None = None
) -> dict[str, Any]:
    """Return settings that run a preset in minutes on two cores.

    Args:
        task: The task to train.
        embedded: True for the task's embedded data, which come with a small model and its learning
            rates; the model would not fit other data.
        steps: Steps of a reported run, if chosen; tuning runs take half as many.
    """
    steps = _STEPS if steps is None else steps
    settings = {**_QUICK, "steps": steps, "tuning_steps": max(1, steps // 2)}
    model = {"model_config": _MODELS[task], "lr_scale": _SMALL_MODEL_LR_SCALE}
    return {**settings, "batch_size": _BATCH_SIZES[task], **(model if embedded else {})}

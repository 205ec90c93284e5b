"""What is compared, part by part: methods, numbers of workers, data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlion_lab.training.compare_settings import CompareSettings
from distlion_lab.training.presets import make_quick
from distlion_lab.training.train_settings import PartitionName, TaskName

_HERE = Path(__file__).resolve().parent

# For all methods of a task alike. How lr_scale was found: studies/lab-notebook.md.
_REAL: Mapping[TaskName, Mapping[str, Any]] = {
    TaskName.IMAGES: {
        "model_config": _HERE / "vit.json",
        "batch_size": 32,
        "lr_scale": 2.0,
        "steps": 120,
        "tuning_steps": 80,
        "eval_every": 40,
    },
    TaskName.TEXT: {
        "model_config": _HERE / "gpt.json",
        "batch_size": 4,
        "lr_scale": 0.5,
        "lrs": 1,
        "steps": 160,
        "eval_every": 40,
    },
}


@dataclass(frozen=True)
class Part:
    """One comparison of the study.

    Attributes:
        name: Of its folder.
        task: What is trained.
        methods: Names of contenders.
        workers: Numbers of virtual workers.
        runs: Name of the folder that keeps the runs; parts that share it share runs.
        others: Settings of its own, such as how the training data is shared out.
        figures: Those of its report that a page of the documentation shows.
    """

    name: str
    task: TaskName
    methods: tuple[str, ...]
    workers: tuple[int, ...]
    runs: str
    others: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[str, ...] = ()

    def settings(self, data: str | None, *, seeds: int) -> CompareSettings:
        """Return the settings on real data, or in minutes on what is embedded."""
        given: dict[str, Any]
        if data is None:
            # Not the workers of make_quick: ties are asked for by number.
            given = make_quick(self.task) | {"workers": self.workers}
        else:
            given = {**_REAL[self.task], "workers": self.workers, "data": data}
        return CompareSettings.with_defaults(
            self.task, **given | {"methods": self.methods, "seeds": seeds, **self.others}
        )


def _skewed(alpha: float, *more: str) -> Part:
    partition = {"partition": PartitionName.BY_CLASS, "alpha": alpha}
    methods = (*_SKEWED, *more)
    return Part(f"images-alpha-{alpha:g}", TaskName.IMAGES, methods, (8,), "images", partition)


_SKEWED = ("global-lion", "majority", "average", "majority-sync-10")

_SYNCS = ("majority-sync-10", "majority-sync-10-attention")

_RULES = (
    "global-lion",
    "majority",
    "majority-zero",
    "quantized-2",
    "quantized-4",
    "quantized-2-linf",
    "quantized-4-linf",
    *_SYNCS,
)

PARTS = (
    Part(
        "images-baselines",
        TaskName.IMAGES,
        (
            "majority",
            "average",
            "global-lion",
            "global-adamw",
            "terngrad-adamw",
            "graddrop-adamw",
            "dgc",
        ),
        (4, 8, 16, 32),
        "images",
        figures=("bits.png",),
    ),
    Part("images-rules", TaskName.IMAGES, _RULES, (2, 4), "images"),
    # What the skewed ones are set beside.
    Part("images-even", TaskName.IMAGES, (*_SKEWED, "quantized-2", "lion-cub"), (8,), "images"),
    Part("text-rules", TaskName.TEXT, (*_RULES, "average", "lion-cub"), (4,), "text"),
    Part("text-workers", TaskName.TEXT, ("global-lion", "majority", "average"), (4, 8), "text"),
    Part(
        "text-by-book",
        TaskName.TEXT,
        ("global-lion", "majority", "average", "quantized-2", "lion-cub", *_SYNCS),
        (4,),
        "text",
        {"partition": PartitionName.BY_BOOK},
    ),
    _skewed(0.1, "quantized-2", "lion-cub", "majority-sync-10-attention"),
    _skewed(1.0),
)

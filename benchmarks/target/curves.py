"""Train with virtual workers: tuning by validation data, reported curves on test data."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import study_path  # noqa: F401
from images import Images, ImageTask
from runs import Reporter, RunConfig, Task, Trainer
from scoring import Result
from settings import THINNED
from text import Novels, TextTask
from torch import Tensor, nn


class OnTest:
    """A task whose curve is one of test data.

    Args:
        task: What it trains on.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.build_model, self.test = task.build_model, task.test

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each worker."""
        return self._task.batches(step)

    def validate(self, model: nn.Module) -> Result:
        """Score on test data."""
        return self._task.test(model)


class Data:
    """The study's data, of which fewer examples are scored.

    Args:
        images, books: Folders; None where the task is left out.
    """

    def __init__(self, images: Path | None, books: Path | None) -> None:
        self._folders = {"images": images, "text": books}

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks whose data is there."""
        return [task for task, folder in self._folders.items() if folder is not None]

    def folder(self, task: str) -> Path:
        """Return where the data of a task is."""
        folder = self._folders[task]
        assert folder is not None
        return folder

    def build(self, config: RunConfig) -> tuple[Task, str]:
        """Return what a run trains on, and the digest of its data."""
        folder = self.folder(config.task)
        shared = {"batch": config.batch, "workers": max(1, config.workers), "seed": config.seed}
        task: Task
        if config.task == "images":
            images = _read_images(folder)
            task = ImageTask(images, **shared, **config.network, alpha=None)
            digest = images.digest
        else:
            novels = _read_novels(folder, config.network["context"])
            task = TextTask(novels, **shared, **config.network)
            digest = novels.digest
        return task if config.is_tuning else OnTest(task), digest


def make(data: Data, config: RunConfig) -> dict[str, Any]:
    """Do a run, and return what is to be recorded."""
    task, digest = data.build(config)
    outcome = Trainer(config, task, Reporter(config)).run()
    if not config.is_tuning:
        outcome["test_curve"] = outcome.pop("validation")
    return {"data": digest, **outcome}


@cache
def _read_images(folder: Path) -> Images:
    images, thin = Images.read(folder), THINNED["images"]
    validation, test = (
        (pixels[::thin].clone(), labels[::thin].clone())
        for pixels, labels in (images.validation, images.test)
    )
    return replace(images, validation=validation, test=test)


@cache
def _read_novels(folder: Path, context: int) -> Novels:
    novels = Novels.read(folder, context=context)
    return replace(novels, test=novels.test[:: THINNED["text"]].clone())

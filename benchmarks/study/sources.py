"""The data of both tasks, and one run on it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from images import Images, ImageTask
from runs import Reporter, RunConfig, Task, Trainer
from text import Novels, TextTask

CPU = torch.device("cpu")


class Data:
    """The data of both tasks, read when a run needs it.

    Args:
        images, books: Folders; None where no run of the task is to be made.
        device: Where runs take place.
    """

    def __init__(
        self,
        images: Path | None,
        books: Path | None,
        device: torch.device = CPU,
    ) -> None:
        self._images, self._books = images, books
        self._read_images = cache(lambda folder: Images.read(folder).to(device))
        self._read_novels = cache(
            lambda folder, context, split: Novels.read(folder, context=context, split=split).to(
                device
            )
        )

    def has(self, task: str) -> bool:
        """Return whether the data of a task is there."""
        return (self._images if task == "images" else self._books) is not None

    def build(self, config: RunConfig) -> tuple[Task, str]:
        """Return what a run trains on, and the digest of its data."""
        shared = {"batch": config.batch, "workers": max(1, config.workers), "seed": config.seed}
        if config.task == "images":
            if self._images is None:
                sys.exit("--images is needed for this run")
            images = self._read_images(self._images)
            return ImageTask(images, **shared, **config.network, alpha=config.alpha), images.digest
        if self._books is None:
            sys.exit("--books is needed for this run")
        network = dict(config.network)
        novels = self._read_novels(self._books, network["context"], network.pop("split", 0))
        return TextTask(novels, **shared, **network), novels.digest


def make(data: Data, config: RunConfig) -> dict[str, Any]:
    """Do a run, and return what is to be recorded."""
    task, digest = data.build(config)
    return {"data": digest, **Trainer(config, task, Reporter(config)).run()}

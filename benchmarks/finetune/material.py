"""The tasks of fine-tuning, and one run on a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import study_path  # noqa: F401
import torch
from evidence import NOVELS
from images import CLASSES, Images, ImageTask
from language import NovelTask, build_smollm2, read_novels, read_smollm2
from networks import Bert, LiteClassifier, TextClassifier, read_lite
from runs import Reporter, RunConfig, Task, Trainer
from scoring import Result, predict
from settings import DECAYS, SCORED_IMAGES, WARM_UP_SHARE
from text import Novels
from texts import Labeled, Texts, read_mails, read_passages, read_tokenizer
from torch import Tensor, nn

from distlion_lab.errors import DataError

Build = Callable[[int], nn.Module]
"""Build a network whose head depends on a seed."""
_SCORE_BATCH = 100


class TextTask(ImageTask):
    """Texts, drawn as the images of the study are, without crops.

    Args:
        data: The texts.
        build: Builds the network.
        shots: Training examples of each class; 0: all.
        batch, workers, seed, alpha: As of images.
    """

    def __init__(
        self,
        data: Texts,
        build: Build,
        *,
        batch: int,
        workers: int,
        seed: int,
        alpha: float | None,
        shots: int = 0,
    ) -> None:
        kept = data.keep_shots(shots, seed) if shots else data
        sizes = {"batch": batch, "workers": workers, "width": 0, "groups": 0}
        super().__init__(kept, seed=seed, alpha=alpha, **sizes)
        self._texts, self._build = kept, build

    def build_model(self) -> nn.Module:
        """Build the network; its head depends on the seed alone."""
        return self._build(self._seed)

    def draw(self, step: int) -> Tensor:
        """Draw the numbers of the texts of a step, (batch,)."""
        each = self._batch // len(self._owned)
        return torch.cat([self._take(owner, step, each) for owner in range(len(self._owned))])

    def take(self, drawn: Tensor) -> list[Labeled]:
        """Return the batches of all workers, of what was drawn."""
        size = self._batch // self._workers
        tokens, labels = (each[drawn].split(size) for each in self._texts.train)
        return list(zip(tokens, labels, strict=True))

    def predict_validation(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._texts.validation)

    def predict_test(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._texts.test)

    def conclude(self, losses: Tensor, right: Tensor) -> Result:
        """Score predictions; a unit is right in the share of its rows that are."""
        units = right.double().view(-1, self._texts.unit).mean(1)
        return Result(float(losses.double().mean()), float(units.mean()), units.numpy())


def _predict(model: nn.Module, labeled: Labeled) -> tuple[Tensor, Tensor]:
    tokens, labels = (each.split(_SCORE_BATCH) for each in labeled)
    return predict(model, zip(tokens, labels, strict=True))


class PhotoTask(ImageTask):
    """The study's images, for a pretrained network."""

    def __init__(self, data: Images, build: Build, **sizes: Any) -> None:
        super().__init__(data, width=0, groups=0, **sizes)
        self._build = build

    def build_model(self) -> nn.Module:
        """Build the network; its head depends on the seed alone."""
        return self._build(self._seed)


class Material:
    """Pretrained networks and data, read when a run needs them.

    Args:
        folder: Of the packages; None where no text is to be read.
        images: Folder of CIFAR-10; None where no run on images is to be made.
        books: Folder of ``*.txt``; None where no run on novels is to be made.
        device: Where runs on novels take place; all others are made on a CPU.
    """

    def __init__(
        self,
        folder: Path | None,
        images: Path | None,
        books: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self._folder, self._images, self._books, self._device = folder, images, books, device
        self._read_novels = cache(self._read_novels_anew)
        self._read_texts = cache(self._read_texts_anew)
        self._read_bert = cache(Bert.read)
        self._read_images = cache(read_images)

    def has(self, task: str) -> bool:
        """Return whether the data of a task is there."""
        needed = [self._folder]
        needed += [self._images] if task == "images" else []
        needed += [self._books] if task in NOVELS else []
        return None not in needed

    def is_on_gpu(self, task: str) -> bool:
        """Return whether runs on a task take place on a GPU."""
        return task in NOVELS and self._device != "cpu"

    def build(self, config: RunConfig) -> tuple[Task, str]:
        """Return what a run trains on, and the digest of its data.

        Raises:
            DataError: A folder was not given.
        """
        if not self.has(config.task) or self._folder is None:
            raise DataError(
                f"task {config.task!r} needs --data, and --images or --books where it is images or "
                "novels"
            )
        if config.task in NOVELS:
            return self._build_novels(config, self._folder)
        shared = {"batch": config.batch, "workers": max(1, config.workers), "seed": config.seed}
        shared["alpha"] = config.alpha  # type: ignore[assignment]
        network = dict(config.network)
        if config.task == "images":
            assert self._images is not None  # asked above
            images, weights = self._read_images(self._images), read_lite(self._folder)

            def build_lite(seed: int) -> nn.Module:
                return LiteClassifier(weights, n_classes=CLASSES, seed=seed, **network)

            return PhotoTask(images, build_lite, **shared), images.digest
        length, shots = network["length"], network.get("shots", 0)
        texts, bert = self._read_texts(config.task, length), self._read_bert(self._folder)

        def build_bert(seed: int) -> nn.Module:
            return TextClassifier(bert, length=length, n_classes=texts.n_classes, seed=seed)

        return TextTask(texts, build_bert, shots=shots, **shared), texts.digest

    def _build_novels(self, config: RunConfig, folder: Path) -> tuple[NovelTask, str]:
        length, rank = config.network["length"], config.network.get("rank", 0)
        novels = self._read_novels(length)

        def build(seed: int) -> nn.Module:
            return build_smollm2(folder, rank=rank, seed=seed)

        sizes = {"batch": config.batch, "workers": max(1, config.workers), "seed": config.seed}
        return NovelTask(novels, build, context=length, **sizes), novels.digest

    def _read_novels_anew(self, length: int) -> Novels:
        assert self._folder is not None and self._books is not None  # ``build`` has asked
        _, _, tokenize = read_smollm2(self._folder)
        return read_novels(self._books, tokenize, length).to(torch.device(self._device))

    def _read_texts_anew(self, task: str, length: int) -> Texts:
        assert self._folder is not None  # ``build`` has asked
        read = {"spam": read_mails, "brown": read_passages}[task]
        return read(self._folder, read_tokenizer(self._folder), length)


def read_images(folder: Path) -> Images:
    """Read CIFAR-10; of the validation images, so many are scored."""
    images = Images.read(folder)
    pixels, labels = images.validation
    return replace(images, validation=(pixels[:SCORED_IMAGES], labels[:SCORED_IMAGES]))


def make(material: Material, config: RunConfig) -> dict[str, Any]:
    """Do a run, and return what is to be recorded."""
    task, digest = material.build(config)
    schedule = {"warm_up_share": WARM_UP_SHARE, "decay": DECAYS[config.task]}
    trainer = Trainer(config, task, Reporter(config), **schedule)
    where = {"device": torch.cuda.get_device_name()} if material.is_on_gpu(config.task) else {}
    return {"data": digest, **where, **schedule, **trainer.run()}

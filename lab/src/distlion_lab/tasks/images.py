"""Image classification: scikit-learn's digits, or CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import Batch, digest_arrays, seeded_generator
from distlion_lab.tasks.cifar import CLASSES, read_cifar10
from distlion_lab.tasks.models import build_vision_model, default_vision_config, read_model_config
from distlion_lab.tasks.partition import Even, ImagePartition

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HELDOUT_BATCH = 100
_DIGITS_HELDOUT_EVERY = 5
_DIGITS_MAX = 16
_EVEN = Even()
# A run needs one; comparisons alternate between seeds and numbers of workers.
_CACHED_SPLITS = 4


@dataclass(frozen=True)
class _LabeledImages:
    """Images (n, channels, size, size) float32, standardized, with classes (n,) int64."""

    source: str
    train_images: Tensor
    train_labels: Tensor
    heldout_images: Tensor
    heldout_labels: Tensor


class _Shard:
    """The images of one rank, in a new order for every epoch; keeps the latest order.

    Args:
        images: (n,) int64 numbers of the rank's images, at least one.
        seed: Seed of the orders, together with ``rank``.
        rank: Rank that owns the shard.
    """

    def __init__(self, images: Tensor, *, seed: int, rank: int) -> None:
        self._images = images
        self._seed = seed
        self._rank = rank
        self._latest: tuple[int, Tensor] | None = None

    def choose(self, first: int, count: int) -> Tensor:
        """Return the ``count`` images from the ``first`` one on, counted over all epochs."""
        size = len(self._images)
        epochs = range(first // size, (first + count - 1) // size + 1)
        order = torch.cat([self._order(epoch) for epoch in epochs])
        offset = first - epochs.start * size
        return self._images[order[offset : offset + count]]

    def _order(self, epoch: int) -> Tensor:
        if self._latest is None or self._latest[0] != epoch:
            generator = seeded_generator(self._seed, epoch, self._rank)
            self._latest = (
                epoch,
                torch.randperm(len(self._images), generator=generator, device="cpu"),
            )
        return self._latest[1]


class ImageTask:
    """Train a ViT with random weights to classify images.

    A rank takes its own images in a new order in every epoch. Validation uses every fifth digit, or
    CIFAR-10's test batch.

    Args:
        data: Path of the folder ``cifar-10-batches-py``; None for scikit-learn's digits.
        model_config: Path of a transformers config; None for a preset.
        batch_size: Images of a worker in a step.
        partition: Assignment of images to ranks.

    Raises:
        DataError: The data or the config cannot be used, or they do not fit each other.
    """

    name = "images"
    unit = "images"

    def __init__(
        self,
        *,
        data: str | None,
        model_config: Path | None,
        batch_size: int,
        partition: ImagePartition = _EVEN,
    ) -> None:
        self._data = _load_digits() if data is None else _load_cifar(Path(data))
        self._config = self._read_config(model_config)
        self._batch_size = batch_size
        self._partition = partition
        self._cached_split = lru_cache(maxsize=_CACHED_SPLITS)(self._split)

    def _read_config(self, path: Path | None) -> PreTrainedConfig:
        _, channels, _, size = self._data.train_images.shape
        if path is None:
            return default_vision_config(image_size=size, channels=channels, classes=CLASSES)
        config = read_model_config(path)
        given = tuple(
            getattr(config, field, None) for field in ("image_size", "num_channels", "num_labels")
        )
        if given[:2] != (size, channels) or (given[2] or 0) < CLASSES:
            raise DataError(
                f"model config {str(path)!r} has (image_size, num_channels, num_labels) {given}, "
                f"but {self._data.source} needs {(size, channels, CLASSES)}"
            )
        return config

    @property
    def units_per_batch(self) -> int:
        """Return the images that a worker sees in a step."""
        return self._batch_size

    def build_model(self, *, seed: int) -> nn.Module:
        """Build the classifier; its random weights depend on ``seed`` alone."""
        return build_vision_model(self._config, seed=seed)

    def training_batch(self, *, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return the next images of ``rank``'s shard, as a pure function of the arguments.

        Raises:
            DataError: There are fewer images than workers, or than the partition needs.
        """
        shard = self._cached_split(seed, world_size)[rank]
        chosen = shard.choose(step * self._batch_size, self._batch_size)
        images = self._data.train_images[chosen]
        return Batch({"pixel_values": images}, self._data.train_labels[chosen])

    def _split(self, seed: int, world_size: int) -> list[_Shard]:
        labels = self._data.train_labels
        if len(labels) < world_size:
            raise DataError(
                f"image data {self._data.source}: {len(labels)} images for {world_size} workers"
            )
        try:
            owned = self._partition.split_images(
                labels, seed=seed, world_size=world_size, batch_size=self._batch_size
            )
        except DataError as error:
            raise DataError(f"image data {self._data.source}: {error}") from error
        return [_Shard(images, seed=seed, rank=rank) for rank, images in enumerate(owned)]

    def heldout_batches(self) -> Sequence[Batch]:
        """Return the validation images, always the same."""
        images, labels = self._data.heldout_images, self._data.heldout_labels
        parts = [
            slice(first, first + _HELDOUT_BATCH) for first in range(0, len(labels), _HELDOUT_BATCH)
        ]
        return [Batch({"pixel_values": images[part]}, labels[part]) for part in parts]

    @cached_property
    def _digest(self) -> str:
        data = self._data
        parts = (data.train_images, data.train_labels, data.heldout_images, data.heldout_labels)
        return digest_arrays(*(part.numpy() for part in parts))

    def sample(self, model: nn.Module, *, seed: int) -> dict[str, str]:
        """Return nothing, as the model writes no text."""
        return {}

    def describe(self) -> dict[str, str | int]:
        """Return source, digest, sizes in images, partition, and the side of an image in pixels."""
        return {
            "name": self.name,
            "data": self._data.source,
            "data_sha256": self._digest,
            "train_images": len(self._data.train_images),
            "heldout_images": len(self._data.heldout_images),
            "partition": repr(self._partition),
            "image_size": self._data.train_images.shape[-1],
            "model_type": str(self._config.model_type),
        }


def _load_digits() -> _LabeledImages:
    # It costs 2.5 s, so it is imported on demand.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    pixels = torch.from_numpy(digits.images.astype(np.float32))[:, None] / _DIGITS_MAX
    labels = torch.from_numpy(digits.target.astype(np.int64))
    heldout = (
        torch.arange(len(labels), device="cpu") % _DIGITS_HELDOUT_EVERY == _DIGITS_HELDOUT_EVERY - 1
    )
    return _standardize(
        "scikit-learn digits", pixels[~heldout], labels[~heldout], pixels[heldout], labels[heldout]
    )


def _load_cifar(folder: Path) -> _LabeledImages:
    train, train_labels, test, test_labels = read_cifar10(folder)
    return _standardize(
        str(folder),
        torch.from_numpy(train).float() / 255,
        torch.from_numpy(train_labels),
        torch.from_numpy(test).float() / 255,
        torch.from_numpy(test_labels),
    )


def _standardize(
    source: str, train: Tensor, train_labels: Tensor, heldout: Tensor, heldout_labels: Tensor
) -> _LabeledImages:
    """Shift and scale each channel by the mean and deviation of the training images."""
    mean = train.mean(dim=(0, 2, 3), keepdim=True)
    deviation = train.std(dim=(0, 2, 3), keepdim=True).clamp(min=1e-6)
    return _LabeledImages(
        source,
        (train - mean) / deviation,
        train_labels,
        (heldout - mean) / deviation,
        heldout_labels,
    )

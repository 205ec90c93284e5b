"""CIFAR-10 for the study: a small convolutional network, crops and flips, equal for all methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from scoring import Result, ScoredTask, predict
from torch import Tensor, nn

from distlion_lab.tasks.base import digest_arrays, seeded_generator
from distlion_lab.tasks.cifar import read_cifar10
from distlion_lab.tasks.partition import ByClass

VALIDATION_IMAGES = 5000
PAD = 4
SIZE = 32
CLASSES = 10
# Of the whole training set.
MEANS = (0.4914, 0.4822, 0.4465)
DEVIATIONS = (0.2470, 0.2435, 0.2616)
_SCORE_BATCH = 250
_GAIN = 2**0.5
# Apart from each other and from the streams of partitions, which begin with the same seed.
_INIT, _ORDER, _CROP = 0x696E6974, 0x6F72646572, 0x63726F70


class _StandardizedConvolution(nn.Conv2d):
    """Convolve with weights of mean 0 and norm sqrt(2), whatever they are before.

    Reference:
        S. Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight
        Standardization", arXiv:1903.10520.
    """

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        fan_in = self.weight[0].numel()
        weight = (self.weight - mean) * torch.rsqrt(variance * fan_in + 1e-6) * _GAIN
        return F.conv2d(x, weight, padding=self.padding)


class _Residual(nn.Module):
    """Add what a block makes of its input to it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def build_network(width: int, *, groups: int, seed: int, shrink: int = 1) -> nn.Module:
    """Build six convolutions of ``width`` to four times as many channels, with group norm.

    With ``shrink``, squares of so many pixels a side become channels first: fewer places, and so
    less arithmetic for each parameter.

    Group norm and standardized weights see one image at a time, so that how images are shared out
    among workers changes the mean gradient by rounding only.
    """

    def block(inputs: int, outputs: int) -> nn.Module:
        convolution = _StandardizedConvolution(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(groups, outputs), nn.ReLU())

    w = width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded_generator(seed, _INIT).initial_seed())
        network = nn.Sequential(
            *([] if shrink == 1 else [nn.PixelUnshuffle(shrink)]),
            block(3 * shrink**2, w),
            nn.MaxPool2d(2),
            block(w, 2 * w),
            _Residual(block(2 * w, 2 * w)),
            nn.MaxPool2d(2),
            block(2 * w, 4 * w),
            _Residual(block(4 * w, 4 * w)),
            _Residual(block(4 * w, 4 * w)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * w, CLASSES),
        )
    # A third faster on one core than the default order.
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


Labeled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """Images (n, 3, 32, 32) float16, standardized, and classes (n,) int64.

    Attributes:
        train: To train on; padded by 4 zeros on each side.
        validation, test: What is chosen by, and what is reported.
        digest: Of all of it.
    """

    train: Labeled
    validation: Labeled
    test: Labeled
    digest: str

    def to(self, device: torch.device) -> Images:
        """Return a copy on a device."""
        train, validation, test = (
            (pixels.to(device), labels.to(device))
            for pixels, labels in (self.train, self.validation, self.test)
        )
        return replace(self, train=train, validation=validation, test=test)

    @classmethod
    def read(cls, folder: Path) -> Images:
        """Read CIFAR-10; the last 5,000 training images are for validation."""
        train, train_labels, test, test_labels = read_cifar10(folder)
        cut = len(train) - VALIDATION_IMAGES
        pixels, labels = torch.from_numpy(train), torch.from_numpy(train_labels)
        return cls(
            train=(F.pad(_standardize(pixels[:cut]), (PAD,) * 4), labels[:cut]),
            validation=(_standardize(pixels[cut:]), labels[cut:]),
            test=(_standardize(torch.from_numpy(test)), torch.from_numpy(test_labels)),
            digest=digest_arrays(train, train_labels, test, test_labels),
        )


def _standardize(pixels: Tensor) -> Tensor:
    means, deviations = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEANS, DEVIATIONS))
    # In parts, or whole float32 copies of 50,000 images would be made.
    parts = [((part.float() / 255 - means) / deviations).half() for part in pixels.split(5000)]
    return torch.cat(parts)


class ImageTask(ScoredTask):
    """What a run trains on: batches of each worker, the network, and scores.

    Args:
        data: The images.
        batch: Images of all workers together in a step.
        workers: Their number, a divisor of ``batch``.
        seed: Of orders, crops, flips and initial weights.
        width, groups, shrink: Of the network.
        alpha: None where all workers draw from one shuffled set, so that a step sees the same
            images whatever ``workers`` is; else the concentration of classes on workers.
    """

    def __init__(
        self,
        data: Images,
        *,
        batch: int,
        workers: int,
        seed: int,
        width: int,
        groups: int,
        alpha: float | None,
        shrink: int = 1,
    ) -> None:
        self._data = data
        self._batch = batch
        self._workers = workers
        self._seed = seed
        self._size = {"width": width, "groups": groups, "shrink": shrink}
        self._owned = self._share_out(alpha)
        self._order = lru_cache(maxsize=2 * len(self._owned))(self._draw_order)

    def _share_out(self, alpha: float | None) -> list[Tensor]:
        labels = self._data.train[1]
        if alpha is None:
            return [torch.arange(len(labels))]
        each = self._batch // self._workers
        return ByClass(alpha).split_images(
            labels, seed=self._seed, world_size=self._workers, batch_size=each
        )

    def _draw_order(self, owner: int, epoch: int) -> Tensor:
        owned = self._owned[owner]
        generator = seeded_generator(self._seed, _ORDER, owner, epoch)
        return owned[torch.randperm(len(owned), generator=generator)]

    def build_model(self) -> nn.Module:
        """Build the network; its weights depend on the seed alone."""
        return build_network(**self._size, seed=self._seed)

    def batches(self, step: int) -> list[Labeled]:
        """Return the batches of all workers at a step: a pure function of the step."""
        return self.take(self.draw(step))

    def draw(self, step: int) -> Tensor:
        """Draw what a step sees: number, row, column and mirroring of each image, (4, batch)."""
        each = self._batch // len(self._owned)
        numbers = torch.cat([self._take(owner, step, each) for owner in range(len(self._owned))])
        generator = seeded_generator(self._seed, _CROP, step)
        return torch.stack([numbers, *_draw_crops(len(numbers), generator)])

    def take(self, drawn: Tensor) -> list[Labeled]:
        """Return the batches of all workers, of what was drawn, on the device of the data."""
        numbers, top, left, mirrored = drawn.unbind()
        images = _cut(self._data.train[0], numbers, top, left, mirrored)
        labels = self._data.train[1][numbers]
        size = self._batch // self._workers
        return list(zip(images.split(size), labels.split(size), strict=True))

    def _take(self, owner: int, step: int, count: int) -> Tensor:
        size = len(self._owned[owner])
        places = range(step * count, (step + 1) * count)
        epochs = range(places[0] // size, places[-1] // size + 1)
        order = torch.cat([self._order(owner, epoch) for epoch in epochs])
        return order[places[0] - epochs[0] * size :][:count]

    def predict_validation(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.validation)

    def predict_test(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.test)

    def conclude(self, losses: Tensor, right: Tensor) -> Result:
        accuracy = float(right.double().mean())
        units = right.double().cpu().numpy()
        return Result(float(losses.double().mean()), accuracy, units)


def _predict(model: nn.Module, labeled: Labeled) -> tuple[Tensor, Tensor]:
    pairs = zip(labeled[0].split(_SCORE_BATCH), labeled[1].split(_SCORE_BATCH), strict=True)
    return predict(model, ((_as_input(images), labels) for images, labels in pairs))


def _as_input(images: Tensor) -> Tensor:
    return images.float().contiguous(memory_format=torch.channels_last)


def crop_and_flip(padded: Tensor, generator: torch.Generator) -> Tensor:
    """Cut 32 x 32 out of (n, 3, 40, 40), each at a place of its own; mirror every other one."""
    return _cut(padded, torch.arange(len(padded)), *_draw_crops(len(padded), generator))


def _draw_crops(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw row, column and mirroring of ``count`` images, (count,) int64 each."""
    corner = torch.randint(0, 2 * PAD + 1, (count, 2), generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5
    return corner[:, 0], corner[:, 1], mirrored.long()


def _cut(padded: Tensor, numbers: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    side = torch.arange(SIZE, device=padded.device)
    rows = top[:, None] + side
    columns = left[:, None] + torch.where(mirrored[:, None] == 1, SIZE - 1 - side, side)
    cut = padded[numbers[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    # Indexing put channels last already; this only tells torch so.
    return cut.float().permute(0, 3, 1, 2)

"""Novels for the study: bytes, a small GPT, and whole books for validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scoring import Result, ScoredTask, predict
from torch import Tensor, nn

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import digest_arrays, seeded_generator

VALIDATION_BOOKS = ("Roughing It", "The Moonstone")
TEST_BOOKS = ("Emma", "Great Expectations", "Ivanhoe: A Romance", "The Mysterious Island")
OTHER_VALIDATION_BOOKS = ("Oliver Twist", "The Innocents Abroad")
OTHER_TEST_BOOKS = (
    *("Anna Karenina", "Jane Eyre: An Autobiography"),
    *("Moby Dick; Or, The Whale", "The Three Musketeers"),
)
SPLITS = (
    (VALIDATION_BOOKS, TEST_BOOKS),
    (OTHER_VALIDATION_BOOKS, OTHER_TEST_BOOKS),
)
"""Books of validation and test; the others are trained on."""
VALIDATION_WINDOWS = 512
TEST_WINDOWS = 4096
_SCORE_BATCH = 64
_INIT, _PLACE = 0x696E6974, 0x706C616365


class Block(nn.Module):
    """Attend, then transform each position, both added to their normed input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        shape = (count, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Predict the next byte; output weights are those of the embedding of bytes.

    Args:
        width, layers, heads: Its size.
        context: Bytes of a window.
    """

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.bytes.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits (count, length, 256) of windows (count, length) int64."""
        x = self.bytes(windows) + self.places.weight[: windows.shape[1]]
        logits: Tensor = F.linear(self.norm(self.blocks(x)), self.bytes.weight)
        return logits


@dataclass(frozen=True)
class Novels:
    """Whole books, as bytes, or as tokens in int32.

    Attributes:
        train: (n,), all books one after the other.
        validation, test: (windows, context + 1), evenly spaced over each book.
        digest: Of all of it.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    digest: str

    def to(self, device: torch.device) -> Novels:
        """Return a copy on a device."""
        train, validation, test = (
            each.to(device) for each in (self.train, self.validation, self.test)
        )
        return replace(self, train=train, validation=validation, test=test)

    @classmethod
    def read(cls, folder: Path, *, context: int, split: int = 0) -> Novels:
        """Read ``*.txt``, a book each.

        Args:
            folder: Of the books.
            context: Bytes of a window.
            split: Which one of ``SPLITS``.

        Raises:
            DataError: A book of validation or test is missing, or there is none to train on.
        """
        return cls.cut(
            read_books(folder),
            folder,
            context=context,
            held_out=SPLITS[split],
            windows=(VALIDATION_WINDOWS, TEST_WINDOWS),
        )

    @classmethod
    def cut(
        cls,
        books: Mapping[str, np.ndarray],
        folder: Path,
        *,
        context: int,
        held_out: tuple[Sequence[str], Sequence[str]],
        windows: tuple[int, int],
    ) -> Novels:
        """Split books into those to train on and windows of the others.

        Args:
            books: Bytes or tokens, by name.
            folder: Where they are from, for errors.
            context: Bytes or tokens of a window.
            held_out: Books of validation and of test.
            windows: Numbers of their windows.

        Raises:
            DataError: A book of validation or test is missing, or there is none to train on.
        """
        kept = {*held_out[0], *held_out[1]}
        missing = sorted(kept - set(books))
        train = [text for name, text in books.items() if name not in kept]
        if missing or not train:
            raise DataError(f"books in {str(folder)!r}: {missing or 'any to train on'} missing")

        def sample(names: Sequence[str], count: int) -> Tensor:
            each = count // len(names)
            return torch.cat([_spread(books[name], each, length=context + 1) for name in names])

        return cls(
            train=torch.from_numpy(np.concatenate(train)),
            validation=sample(held_out[0], windows[0]),
            test=sample(held_out[1], windows[1]),
            digest=digest_arrays(*books.values()),
        )


def read_books(folder: Path) -> dict[str, np.ndarray]:
    """Read ``*.txt`` of a folder as bytes, by name."""
    return {
        path.stem: np.frombuffer(path.read_bytes(), np.uint8)
        for path in sorted(folder.glob("*.txt"))
    }


def _spread(text: np.ndarray, windows: int, *, length: int) -> Tensor:
    """Return windows (windows, length) at equal distances, none of which overlap."""
    begins = np.linspace(0, len(text) - length, windows).astype(np.int64)
    if len(begins) > 1 and np.diff(begins).min() < length:
        raise DataError(f"a book of {len(text)} bytes has no {windows} windows of {length}")
    return torch.from_numpy(text[begins[:, None] + np.arange(length)])


class TextTask(ScoredTask):
    """What a run trains on: windows of each worker, the network, and scores.

    Args:
        data: The books.
        batch: Windows of all workers together in a step.
        workers: Their number, a divisor of ``batch``.
        seed: Of places and initial weights.
        width, layers, heads, context: Of the network.

    Attributes:
        block_windows: Neighboring windows are alike, so sampling errors are taken over blocks of
            so many.
    """

    block_windows = 32

    def __init__(
        self,
        data: Novels,
        *,
        batch: int,
        workers: int,
        seed: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
    ) -> None:
        self._data = data
        self._batch, self._workers, self._seed = batch, workers, seed
        self._size = {"width": width, "layers": layers, "heads": heads, "context": context}

    def build_model(self) -> nn.Module:
        """Build the network; its weights depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded_generator(self._seed, _INIT).initial_seed())
            return SmallGPT(**self._size)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the windows of all workers at a step: the same ones, whatever their number."""
        return self.take(self.draw(step))

    def draw(self, step: int) -> Tensor:
        """Draw where the windows of a step begin, (batch,) int64."""
        generator = seeded_generator(self._seed, _PLACE, step)
        limit = len(self._data.train) - self._length
        return torch.randint(0, limit, (self._batch,), generator=generator)

    def take(self, drawn: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the windows of all workers, of what was drawn, on the device of the data."""
        places = torch.arange(self._length, device=drawn.device)
        windows = self._data.train[drawn[:, None] + places]
        size = self._batch // self._workers
        return [_as_pair(part) for part in windows.split(size)]

    @property
    def _length(self) -> int:
        return self._size["context"] + 1

    def predict_validation(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.validation)

    def predict_test(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.test)

    def conclude(self, losses: Tensor, right: Tensor) -> Result:
        windows = len(losses) // self._size["context"]
        block = min(self.block_windows, windows) * self._size["context"]
        units = losses.double().view(-1, block).mean(1).cpu().numpy()
        return Result(float(losses.double().mean()), float(right.double().mean()), units)


def _predict(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    return predict(model, (_as_pair(part) for part in windows.split(_SCORE_BATCH)))


def _as_pair(windows: Tensor) -> tuple[Tensor, Tensor]:
    whole = windows.long()
    return whole[:, :-1], whole[:, 1:]

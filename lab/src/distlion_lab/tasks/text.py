"""Causal language modeling: predict the next byte or character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import Batch, digest_arrays, seeded_generator
from distlion_lab.tasks.corpus import Corpus, load_corpus
from distlion_lab.tasks.models import (
    build_language_model,
    default_language_config,
    read_model_config,
)
from distlion_lab.tasks.partition import Contiguous, TextPartition

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_CONTEXT = 128
HELDOUT_WINDOWS = 128
_HELDOUT_BATCH = 16
_BYTE_VALUES = 256
# 4,096 tokens by default. A window may not cross the end of a block, so short blocks would cost
# windows; long ones would mix less.
_BLOCK_CONTEXTS = 32
_CONTIGUOUS = Contiguous()
# A run needs one; comparisons alternate between numbers of workers.
_CACHED_SPLITS = 4

Codes = npt.NDArray[np.integer]


class Tokenizer(str, Enum):
    """The level at which text is cut into tokens."""

    BYTE = "byte"
    CHAR = "char"


class CharVocabulary:
    """A numbering of a text's characters by code point, from 1; 0 stands for all others."""

    def __init__(self, text: str) -> None:
        self._code_points = np.unique(_code_points(text))

    def __len__(self) -> int:
        return len(self._code_points) + 1

    def encode(self, text: str) -> Codes:
        """Return (len(text),) int32 numbers; 0 for a character outside the vocabulary."""
        wanted = _code_points(text)
        place = np.searchsorted(self._code_points, wanted)
        place = np.minimum(place, len(self._code_points) - 1)
        known = self._code_points[place] == wanted
        return np.where(known, place + 1, 0).astype(np.int32)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype=np.uint32)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a corpus; ``book_tokens`` are the lengths of its training books."""

    train: Codes
    heldout: Codes
    vocabulary_size: int
    book_tokens: Sequence[int]


class _Shard:
    """A numbering of the windows within a rank's spans, so that each is drawn equally often.

    Args:
        spans: Ascending places in the training text.
        context: Context length. A window has one more token, and lies within a span.
    """

    def __init__(self, spans: Sequence[range], *, context: int) -> None:
        windows = [(span.start, len(span) - context) for span in spans if len(span) > context]
        self._ends = np.cumsum([count for _, count in windows], dtype=np.int64)
        self.windows = int(self._ends[-1]) if windows else 0
        # Start of a span's windows, as if its first one had number 0.
        self._origins = np.array([start for start, _ in windows], dtype=np.int64)
        self._origins[1:] -= self._ends[:-1]

    def locate(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the starts in the text of windows with these numbers, below ``windows``."""
        return numbers + self._origins[np.searchsorted(self._ends, numbers, side="right")]


class TextTask:
    """Train a causal language model with random weights on a text.

    A rank draws windows at random places of its own part of the training text, so no two ranks see
    the same token. Validation uses 128 windows spread evenly over the validation part (fewer if it
    is shorter).

    Args:
        data: Source of the text, as in ``load_corpus``.
        tokenizer: Level of the tokens.
        model_config: Path of a transformers config; None for the preset of 0.8 million parameters.
        batch_size: Windows of a worker in a step.
        partition: Assignment of parts of the text to ranks.

    Raises:
        DataError: The text or the config cannot be used, or they do not fit each other.
    """

    name = "text"
    unit = "tokens"

    def __init__(
        self,
        *,
        data: str | None,
        tokenizer: Tokenizer,
        model_config: Path | None,
        batch_size: int,
        partition: TextPartition = _CONTIGUOUS,
    ) -> None:
        corpus = load_corpus(data)
        self._source = corpus.source
        self._tokens = _tokenize(corpus, tokenizer)
        self._config = self._read_config(model_config, tokenizer)
        positions = getattr(self._config, "max_position_embeddings", None)
        self.context = int(positions or DEFAULT_CONTEXT)
        self._batch_size = batch_size
        self._partition = partition
        self._cached_split = lru_cache(maxsize=_CACHED_SPLITS)(self._split)
        if len(self._tokens.heldout) <= self.context:
            raise DataError(
                f"text data {self._source}: the validation part has {len(self._tokens.heldout)} "
                f"tokens, "
                f"but a window needs {self.context + 1}; give a longer text or a model of shorter "
                f"context"
            )

    def _read_config(self, path: Path | None, tokenizer: Tokenizer) -> PreTrainedConfig:
        needed = self._tokens.vocabulary_size
        if path is None:
            return default_language_config(needed, context=DEFAULT_CONTEXT)
        config = read_model_config(path)
        vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None or vocab_size < needed:
            raise DataError(
                f"model config {str(path)!r} has vocab_size {vocab_size}, but the "
                f"{tokenizer.value} tokens of {self._source} need {needed}"
            )
        config.use_cache = False
        return config

    @property
    def units_per_batch(self) -> int:
        """Return the tokens that a worker predicts in a step."""
        return self._batch_size * self.context

    def build_model(self, *, seed: int) -> nn.Module:
        """Build the language model; its random weights depend on ``seed`` alone."""
        return build_language_model(self._config, seed=seed)

    def training_batch(self, *, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return random windows of ``rank``'s shard, as a pure function of the arguments.

        Raises:
            DataError: The text is too short for so many workers.
        """
        shard = self._cached_split(world_size)[rank]
        generator = seeded_generator(seed, step, rank)
        numbers = torch.randint(
            shard.windows, (self._batch_size,), generator=generator, device="cpu"
        )
        return self._cut_windows(self._tokens.train, shard.locate(numbers.numpy()).tolist())

    def _split(self, world_size: int) -> list[_Shard]:
        spans = self._partition.split_text(
            self._tokens.book_tokens,
            world_size=world_size,
            block_tokens=_BLOCK_CONTEXTS * self.context,
        )
        shards = [_Shard(owned, context=self.context) for owned in spans]
        for rank, shard in enumerate(shards):
            if not shard.windows:
                raise DataError(
                    f"text data {self._source}: {len(self._tokens.train)} training tokens in "
                    f"{len(self._tokens.book_tokens)} books for {world_size} workers, divided "
                    f"by {self._partition}, leave no window of {self.context + 1} tokens to rank "
                    f"{rank}; take fewer workers, more text or another partition"
                )
        return shards

    def heldout_batches(self) -> Sequence[Batch]:
        """Return windows spread evenly over the validation text, always the same."""
        heldout = self._tokens.heldout
        places = len(heldout) - self.context
        count = min(HELDOUT_WINDOWS, max(1, places // self.context))
        starts = [places * index // count for index in range(count)]
        return [
            self._cut_windows(heldout, starts[first : first + _HELDOUT_BATCH])
            for first in range(0, count, _HELDOUT_BATCH)
        ]

    def _cut_windows(self, tokens: Codes, starts: Sequence[int]) -> Batch:
        windows = np.stack([tokens[start : start + self.context + 1] for start in starts])
        both = torch.from_numpy(windows.astype(np.int64))
        return Batch({"input_ids": both[:, :-1].contiguous()}, both[:, 1:].contiguous())

    @cached_property
    def _digest(self) -> str:
        return digest_arrays(self._tokens.train, self._tokens.heldout)

    def describe(self) -> dict[str, str | int]:
        """Return source, digest, sizes in tokens, books, partition, vocabulary and context."""
        return {
            "name": self.name,
            "data": self._source,
            "data_sha256": self._digest,
            "train_tokens": len(self._tokens.train),
            "train_books": len(self._tokens.book_tokens),
            "heldout_tokens": len(self._tokens.heldout),
            "partition": repr(self._partition),
            "vocabulary": self._tokens.vocabulary_size,
            "context": self.context,
            "model_type": str(self._config.model_type),
        }


def _tokenize(corpus: Corpus, tokenizer: Tokenizer) -> _Tokens:
    if tokenizer is Tokenizer.BYTE:
        train, heldout = (
            np.frombuffer(part, dtype=np.uint8) for part in (corpus.train, corpus.heldout)
        )
        return _Tokens(train, heldout, _BYTE_VALUES, corpus.book_bytes)
    ends = accumulate(corpus.book_bytes, initial=0)
    books = [corpus.train[begin:end].decode(errors="replace") for begin, end in pairwise(ends)]
    text = "".join(books)
    vocabulary = CharVocabulary(text)
    return _Tokens(
        vocabulary.encode(text),
        vocabulary.encode(corpus.heldout.decode(errors="replace")),
        len(vocabulary),
        [len(book) for book in books],
    )

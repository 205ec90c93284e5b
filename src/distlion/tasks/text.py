"""Causal language modelling: predict the next byte or character."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from distlion.errors import DataError
from distlion.tasks.base import Batch, seeded_generator
from distlion.tasks.corpus import Corpus, load_corpus
from distlion.tasks.models import (
    build_language_model,
    default_language_config,
    read_model_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_CONTEXT = 128
HELDOUT_WINDOWS = 128
_HELDOUT_BATCH = 16
_BYTE_VALUES = 256

Codes = npt.NDArray[np.integer]


class Tokenizer(str, Enum):
    """The level at which text is cut into tokens."""

    BYTE = "byte"
    CHAR = "char"


class CharVocabulary:
    """Number the characters of a text by code point, from 1; 0 stands for any other character."""

    def __init__(self, text: str) -> None:
        self._code_points = np.unique(_code_points(text))

    def __len__(self) -> int:
        return len(self._code_points) + 1

    def encode(self, text: str) -> Codes:
        """Return (len(text),) int32 numbers, 0 for a character that the vocabulary lacks."""
        wanted = _code_points(text)
        place = np.searchsorted(self._code_points, wanted)
        place = np.minimum(place, len(self._code_points) - 1)
        known = self._code_points[place] == wanted
        return np.where(known, place + 1, 0).astype(np.int32)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype=np.uint32)


class TextTask:
    """Train a causal language model with random weights on a text.

    Rank r of N draws windows at random places of the r-th of N equal parts of the training text, so
    that no byte is seen by two ranks. Held out: 128 windows spread evenly over the held-out part
    (fewer if it is shorter).

    Args:
        data: As in ``load_corpus``.
        tokenizer: Level of the tokens.
        model_config: Path of a transformers config; None for the preset of 0.8 million parameters.
        batch_size: Windows of a worker in a step.

    Raises:
        DataError: The text or the config cannot be used, or they do not fit each other.
        MissingDependencyError: A package of the extra ``train`` is not installed.
    """

    name = "text"
    unit = "tokens"

    def __init__(
        self, *, data: str | None, tokenizer: Tokenizer, model_config: Path | None, batch_size: int
    ) -> None:
        corpus = load_corpus(data)
        self._source = corpus.source
        self._train, self._heldout, self._vocabulary_size = _tokenize(corpus, tokenizer)
        self._config = self._read_config(model_config, tokenizer)
        positions = getattr(self._config, "max_position_embeddings", None)
        self.context = int(positions or DEFAULT_CONTEXT)
        self._batch_size = batch_size
        if len(self._heldout) <= self.context:
            raise DataError(
                f"text data {self._source}: the held-out part has {len(self._heldout)} tokens, "
                f"but a window needs {self.context + 1}; give a longer text or a model of shorter "
                f"context"
            )

    def _read_config(self, path: Path | None, tokenizer: Tokenizer) -> PreTrainedConfig:
        if path is None:
            return default_language_config(self._vocabulary_size, context=DEFAULT_CONTEXT)
        config = read_model_config(path)
        vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None or vocab_size < self._vocabulary_size:
            raise DataError(
                f"model config {str(path)!r} has vocab_size {vocab_size}, but the "
                f"{tokenizer.value} tokens of {self._source} need {self._vocabulary_size}"
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
        """Return random windows of the shard of ``rank``: a pure function of the arguments.

        Raises:
            DataError: The text is too short for so many workers.
        """
        begin = len(self._train) * rank // world_size
        end = len(self._train) * (rank + 1) // world_size
        places = end - begin - self.context
        if places < 1:
            raise DataError(
                f"text data {self._source}: {len(self._train)} training tokens for {world_size} "
                f"workers leave no window of {self.context + 1} tokens to rank {rank}"
            )
        generator = seeded_generator(seed, step, rank)
        starts = begin + torch.randint(places, (self._batch_size,), generator=generator)
        return self._cut_windows(self._train, starts.tolist())

    def heldout_batches(self) -> Sequence[Batch]:
        """Return windows spread evenly over the held-out text, always the same."""
        places = len(self._heldout) - self.context
        count = min(HELDOUT_WINDOWS, max(1, places // self.context))
        starts = [places * index // count for index in range(count)]
        return [
            self._cut_windows(self._heldout, starts[first : first + _HELDOUT_BATCH])
            for first in range(0, count, _HELDOUT_BATCH)
        ]

    def _cut_windows(self, tokens: Codes, starts: Sequence[int]) -> Batch:
        windows = np.stack([tokens[start : start + self.context + 1] for start in starts])
        both = torch.from_numpy(windows.astype(np.int64))
        return Batch({"input_ids": both[:, :-1].contiguous()}, both[:, 1:].contiguous())

    def describe(self) -> dict[str, str | int]:
        """Return source, sizes in tokens, vocabulary and context."""
        return {
            "name": self.name,
            "data": self._source,
            "train_tokens": len(self._train),
            "heldout_tokens": len(self._heldout),
            "vocabulary": self._vocabulary_size,
            "context": self.context,
            "model_type": str(self._config.model_type),
        }


def _tokenize(corpus: Corpus, tokenizer: Tokenizer) -> tuple[Codes, Codes, int]:
    """Return the training tokens, the held-out tokens and the size of the vocabulary."""
    if tokenizer is Tokenizer.BYTE:
        train, heldout = (
            np.frombuffer(part, dtype=np.uint8) for part in (corpus.train, corpus.heldout)
        )
        return train, heldout, _BYTE_VALUES
    text = corpus.train.decode(errors="replace")
    vocabulary = CharVocabulary(text)
    heldout_text = corpus.heldout.decode(errors="replace")
    return vocabulary.encode(text), vocabulary.encode(heldout_text), len(vocabulary)

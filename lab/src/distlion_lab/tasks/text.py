"""Causal language modeling: predict the next byte, character or word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from distlion_lab.tasks.vocabulary import (
    ByteVocabulary,
    CharVocabulary,
    Codes,
    Vocabulary,
    WordVocabulary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_CONTEXT = 128
HELDOUT_WINDOWS = 128
_HELDOUT_BATCH = 16
# Of samples: below 1, so that a small model keeps to what it is sure of.
_TEMPERATURE = 0.7
# 4,096 tokens by default. A window may not cross the end of a block, so short blocks would cost
# windows; long ones would mix less.
_BLOCK_CONTEXTS = 32
_CONTIGUOUS = Contiguous()
# A run needs one; comparisons alternate between numbers of workers.
_CACHED_SPLITS = 4


class Tokenizer(str, Enum):
    """The level at which text is cut into tokens."""

    BYTE = "byte"
    CHAR = "char"
    WORD = "word"


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a corpus; ``book_tokens`` are the lengths of its training books."""

    train: Codes
    heldout: Codes
    vocabulary: Vocabulary
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
        model_config: Path of a transformers config; None for a preset of 0.4 million parameters, or
            0.7 million for words.
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
        needed = len(self._tokens.vocabulary)
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

    def sample(self, model: nn.Module, *, seed: int) -> dict[str, str]:
        """Let a model continue a line from the middle of the validation text.

        Each token is drawn from softmax(logits / 0.7) over known words or characters, given the
        last tokens that fit the context. The prompt has up to 64 tokens, or half of a shorter
        context, and ends behind a space if it has one; prompt and continuation have four times as
        many.

        Args:
            model: The model; it is evaluated where its parameters are, without gradients.
            seed: Seed of the draws.
        """
        heldout, vocabulary = self._tokens.heldout, self._tokens.vocabulary
        given = max(1, min(self.context, DEFAULT_CONTEXT) // 2)
        start = self._find_line(len(heldout) // 2)
        window = heldout[start : start + 4 * given].tolist()
        prompt = self._cut_after_space(window[:given])
        written = _write(
            model,
            prompt,
            len(window),
            seeded_generator(seed),
            context=self.context,
            vocabulary=vocabulary,
        )
        return {
            "prompt": vocabulary.decode(prompt),
            "model": vocabulary.decode(written),
            "data": vocabulary.decode(window[len(prompt) :]),
        }

    def _cut_after_space(self, prompt: list[int]) -> list[int]:
        """Return what ends behind the last space; all of what has none."""
        for end in range(len(prompt), 0, -1):
            if self._tokens.vocabulary.decode(prompt[end - 1 : end]).isspace():
                return prompt[:end]
        return prompt

    def _find_line(self, middle: int) -> int:
        """Return the place behind the first end of a line within a context, or the middle."""
        last = len(self._tokens.heldout) - self.context
        for place in range(middle, min(last, middle + self.context)):
            if "\n" in self._tokens.vocabulary.decode([int(self._tokens.heldout[place])]):
                return place + 1
        return min(middle, last)

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
            "vocabulary": len(self._tokens.vocabulary),
            "context": self.context,
            "model_type": str(self._config.model_type),
        }


def _write(
    model: nn.Module,
    prompt: Sequence[int],
    n_tokens: int,
    generator: torch.Generator,
    *,
    context: int,
    vocabulary: Vocabulary,
) -> list[int]:
    """Continue a prompt up to ``n_tokens``, and return the new tokens, all of them known."""
    codes, device = list(prompt), next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        while len(codes) < n_tokens:
            seen = torch.tensor([codes[-context:]], dtype=torch.int64, device=device)
            logits = model(input_ids=seen).logits[0, -1]
            logits = logits.float().cpu() / _TEMPERATURE
            logits[list(vocabulary.unknown)] = -torch.inf
            logits[len(vocabulary) :] = -torch.inf  # a config may have more tokens than the text
            shares = logits.softmax(dim=-1)
            codes.append(int(torch.multinomial(shares, 1, generator=generator)))
    model.train(was_training)
    return codes[len(prompt) :]


_VOCABULARIES: Mapping[Tokenizer, Callable[[bytes], Vocabulary]] = {
    Tokenizer.BYTE: lambda text: ByteVocabulary(),
    Tokenizer.CHAR: CharVocabulary,
    Tokenizer.WORD: WordVocabulary,
}


def _tokenize(corpus: Corpus, tokenizer: Tokenizer) -> _Tokens:
    vocabulary = _VOCABULARIES[tokenizer](corpus.train)
    if isinstance(vocabulary, ByteVocabulary):  # without a copy, as a text may have 2^30 bytes
        train, heldout = vocabulary.encode(corpus.train), vocabulary.encode(corpus.heldout)
        return _Tokens(train, heldout, vocabulary, corpus.book_bytes)
    ends = accumulate(corpus.book_bytes, initial=0)
    books = [vocabulary.encode(corpus.train[begin:end]) for begin, end in pairwise(ends)]
    return _Tokens(
        np.concatenate(books),
        vocabulary.encode(corpus.heldout),
        vocabulary,
        [len(book) for book in books],
    )

"""The tokens of a text: its bytes, its characters, or its most frequent words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.integer]

WORD_TOKENS = 2048
"""Size of a vocabulary of words."""
_BYTE_VALUES = 256
_UNKNOWN = " …".encode()
# A word or a sign with the space before it, the end of a line with the next one's indentation, or
# any other byte. Names are cut at underscores and capital letters.
_PIECE = re.compile(rb" ?(?:[A-Z]?[a-z]+|[A-Z]+(?![a-z]))|\n[ \n]*| ?[^\sA-Za-z0-9]+|.", re.DOTALL)


class Vocabulary(Protocol):
    """A numbering of tokens.

    Attributes:
        unknown: The tokens that stand for all others.
    """

    unknown: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of tokens."""

    def encode(self, text: bytes) -> Codes:
        """Return the tokens of a text in UTF-8: (n,), below ``len(self)``."""

    def decode(self, codes: Sequence[int]) -> str:
        """Return the text of some tokens; U+FFFD stands for what is no known character."""


class ByteVocabulary:
    """The 256 bytes."""

    unknown: tuple[int, ...] = ()

    def __len__(self) -> int:
        return _BYTE_VALUES

    def encode(self, text: bytes) -> Codes:
        """Return (len(text),) uint8, a view."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, codes: Sequence[int]) -> str:
        return bytes(codes).decode(errors="replace")


class CharVocabulary:
    """A numbering of a text's characters by code point, from 1; 0 stands for all others.

    Args:
        text: The text, in UTF-8.
    """

    unknown: tuple[int, ...] = (0,)

    def __init__(self, text: bytes) -> None:
        self._code_points = np.unique(_code_points(text))

    def __len__(self) -> int:
        return len(self._code_points) + 1

    def encode(self, text: bytes) -> Codes:
        """Return (characters,) int32 numbers; 0 for a character outside the vocabulary."""
        wanted = _code_points(text)
        place = np.searchsorted(self._code_points, wanted)
        place = np.minimum(place, len(self._code_points) - 1)
        known = self._code_points[place] == wanted
        return np.where(known, place + 1, 0).astype(np.int32)

    def decode(self, codes: Sequence[int]) -> str:
        return "".join(chr(self._code_points[code - 1]) if code else "\ufffd" for code in codes)


class WordVocabulary:
    """A numbering of a text's most frequent words and signs, from 1; 0 stands for all others.

    Args:
        text: The text, in UTF-8.
        size: Number of tokens, at least 1; a short text has fewer words.
    """

    unknown: tuple[int, ...] = (0,)

    def __init__(self, text: bytes, *, size: int = WORD_TOKENS) -> None:
        counts = Counter(_PIECE.findall(text))
        self._words = sorted(counts, key=lambda word: (-counts[word], word))[: size - 1]
        self._codes = {word: code for code, word in enumerate(self._words, start=1)}

    def __len__(self) -> int:
        return len(self._words) + 1

    def encode(self, text: bytes) -> Codes:
        """Return (words,) int32 numbers; 0 for a word outside the vocabulary."""
        known = self._codes
        return np.array([known.get(word, 0) for word in _PIECE.findall(text)], dtype=np.int32)

    def decode(self, codes: Sequence[int]) -> str:
        """Return the text; an ellipsis stands for a word outside the vocabulary."""
        words = (self._words[code - 1] if code else _UNKNOWN for code in codes)
        return b"".join(words).decode(errors="replace")


def _code_points(text: bytes) -> npt.NDArray[np.uint32]:
    decoded = text.decode(errors="replace")
    return np.frombuffer(decoded.encode("utf-32-le", errors="replace"), dtype=np.uint32)

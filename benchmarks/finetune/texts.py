"""Mails of five folders and passages of 15 genres, as tokens of MiniLM."""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import study_path  # noqa: F401
import torch
from packages import PACKAGES, read_tarball, read_wheel
from tokenizers import Tokenizer
from torch import Tensor

from distlion_lab.tasks.base import digest_arrays, seeded_generator

FOLDERS = ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2")
TEST_MAILS, VALIDATION_MAILS = 2400, 600
TEST_SHARE, VALIDATION_SHARE = 0.3, 0.1
"""Of the texts of each genre."""
SCORED_PASSAGES = 20
"""Of each text of validation and test."""
CLS, SEP, PAD = 101, 102, 0
_SPLIT, _SHOTS = 0x73706C6974, 0x73686F7473
_MOST_CHARACTERS = 1000
"""Of a mail; several times what is kept as tokens."""

Labeled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Texts:
    """Tokens (n, length) int64 and classes (n,) int64.

    Attributes:
        train, validation, test: What is trained on, chosen by, and reported.
        n_classes: Number of classes.
        unit: Neighboring rows of validation and test that count as one unit, since they are of the
            same text.
        digest: Of all of it.
    """

    train: Labeled
    validation: Labeled
    test: Labeled
    n_classes: int
    unit: int
    digest: str

    def keep_shots(self, shots: int, seed: int) -> Texts:
        """Return a copy with so many training examples a class, or all that a class has."""
        tokens, labels = self.train
        order = torch.randperm(len(labels), generator=seeded_generator(seed, _SHOTS))
        rows = [order[labels[order] == label][:shots] for label in range(self.n_classes)]
        kept = torch.cat(rows).sort().values
        return replace(self, train=(tokens[kept], labels[kept]))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of MiniLM, without truncation or padding."""
    path = folder / PACKAGES["minilm"].file
    content = read_wheel(path, "all_minilm_l6_v2/model.zip", "tokenizer.json")
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# Mails


def read_mails(folder: Path, tokenizer: Tokenizer, length: int) -> Texts:
    """Read the mails of SpamAssassin; a class is a folder.

    The split is the same for all seeds. Of mails with the same text, the first one is kept.
    """
    found = list_mails(folder)
    encoded = tokenizer.encode_batch(list(found), add_special_tokens=False)
    tokens = _stack([each.ids for each in encoded], length)
    labels = torch.tensor([FOLDERS.index(each) for each in found.values()])
    order = torch.randperm(len(labels), generator=seeded_generator(_SPLIT))
    n_test, n_validation = share_out(len(labels), TEST_MAILS, VALIDATION_MAILS)
    test, validation, train = order.tensor_split([n_test, n_test + n_validation])
    parts_of = [(tokens[rows], labels[rows]) for rows in (train, validation, test)]
    return _join(parts_of, n_classes=len(FOLDERS), unit=1)


def list_mails(folder: Path) -> dict[str, str]:
    """Return the text of each mail with the name of its folder, in the order of their files."""
    files = read_tarball(folder / PACKAGES["spam"].file)
    found: dict[str, str] = {}
    for name in sorted(files):
        parts = name.split("/")
        if parts[0] == "data" and parts[-2] in FOLDERS and name.endswith(".txt"):
            found.setdefault(extract_text(files[name]), parts[-2])
    return found


def share_out(total: int, n_test: int, n_validation: int) -> tuple[int, int]:
    """Return sizes of test and validation: at most half and an eighth of all."""
    return min(n_test, total // 2), min(n_validation, total // 8)


def extract_text(mail: bytes) -> str:
    """Return subject and body of a mail, as plain words.

    Other headers are left out: their dates and hosts tell one folder from another.
    """
    message = email.message_from_bytes(mail, policy=email.policy.compat32)
    body = " ".join(_list_bodies(message))
    subject = str(message.get("Subject", ""))
    plain = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", body, flags=re.S | re.I)
    return " ".join(f"{subject} . {plain}".split())[:_MOST_CHARACTERS]


def _list_bodies(message: email.message.Message) -> Iterator[str]:
    for part in message.walk():
        if part.get_content_maintype() == "text":
            payload = part.get_payload(decode=True)
            if isinstance(payload, bytes):
                yield payload.decode("latin-1")


# Passages


def read_passages(folder: Path, tokenizer: Tokenizer, length: int) -> Texts:
    """Read the Brown corpus; a class is a genre, and no text is in two of the three parts."""
    files = read_tarball(folder / PACKAGES["brown"].file)
    rows = [line.split() for line in files["cats.txt"].decode().splitlines() if line.strip()]
    genres = dict(rows)
    names = sorted(set(genres.values()))
    parts: tuple[list[Labeled], ...] = ([], [], [])
    for place, texts in enumerate(split_by_genre(genres)):
        for text in texts:
            words = untag(files[text].decode("latin-1"))
            ids = tokenizer.encode(words, add_special_tokens=False).ids
            passages = cut(ids, length, scored=place > 0)
            label = torch.full((len(passages),), names.index(genres[text]))
            parts[place].append((passages, label))
    joined = [tuple(torch.cat(each) for each in zip(*part, strict=True)) for part in parts]
    return _join(joined, n_classes=len(names), unit=SCORED_PASSAGES)


def split_by_genre(genres: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Split names of texts into training, validation and test, genre by genre."""
    train: list[str] = []
    validation: list[str] = []
    test: list[str] = []
    for number, genre in enumerate(sorted(set(genres.values()))):
        own = sorted(name for name in genres if genres[name] == genre)
        order = torch.randperm(len(own), generator=seeded_generator(_SPLIT, number))
        drawn = [own[place] for place in order.tolist()]
        n_test = max(1, round(TEST_SHARE * len(own)))
        n_validation = max(1, round(VALIDATION_SHARE * len(own)))
        test += drawn[:n_test]
        validation += drawn[n_test : n_test + n_validation]
        train += drawn[n_test + n_validation :]
    return train, validation, test


def untag(text: str) -> str:
    """Return the words of ``word/tag`` pairs."""
    words = " ".join(pair.rsplit("/", 1)[0] for pair in text.split())
    return words.replace("``", '"').replace("''", '"')


def cut(ids: Sequence[int], length: int, *, scored: bool) -> Tensor:
    """Cut the tokens of a text into passages (n, length).

    Args:
        ids: Of the whole text.
        length: Of a passage, with both special tokens.
        scored: Whether to take ``SCORED_PASSAGES``, evenly spaced; else all, one after the other.
    """
    own = length - 2
    starts = list(range(0, max(1, len(ids) - own + 1), own))
    if scored:
        starts = np.linspace(0, max(0, len(ids) - own), SCORED_PASSAGES).astype(int).tolist()
    return _stack([ids[start : start + own] for start in starts], length)


def _stack(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return rows with special tokens, cut or padded, (n, length) int64."""
    tokens = torch.full((len(rows), length), PAD)
    for place, row in enumerate(rows):
        kept = [CLS, *row[: length - 2], SEP]
        tokens[place, : len(kept)] = torch.tensor(kept)
    return tokens


def _join(parts: Sequence[Labeled], *, n_classes: int, unit: int) -> Texts:
    digest = digest_arrays(*(each.numpy() for part in parts for each in part))
    train, validation, test = parts
    return Texts(train, validation, test, n_classes=n_classes, unit=unit, digest=digest)

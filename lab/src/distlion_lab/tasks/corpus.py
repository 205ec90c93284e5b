"""Texts to train on: the standard library's documentation, files, or a Hugging Face data set."""

from __future__ import annotations

import codecs
import logging
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlion_lab.errors import DataError
from distlion_lab.plain_file import read_plain_file

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]

# Documentation inside of source code, and a paragraph of prose there: sentences of words alone.
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_PROSE = re.compile(r"[A-Z][A-Za-z ,.:;()'\"-]{58,}[.:]")
# A hub data set can be larger than memory; rows beyond this many bytes are left out.
HUB_BYTES = 64_000_000
# A corpus of 10^9 bytes, enwik9, fits.
FILE_BYTES = 1 << 30
HUB_PREFIX = "hf:"
BOOK_PATTERN = "*.txt"
HELDOUT_SHARE = 0.05
_HELDOUT_EVERY = round(1 / HELDOUT_SHARE)
_CHUNK_BYTES = 1 << 22
_SHOWN_CHARACTERS = 80
# Tests, generated tables and bundled packages say little in sentences.
_EXCLUDED_FOLDERS = frozenset(
    {
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_EXPECTED = (
    f"expected the path of a text file or of a folder of {BOOK_PATTERN}, {HUB_PREFIX}NAME, or "
    "nothing for the prose of Python's standard library"
)


@dataclass(frozen=True)
class Corpus:
    """A text, split into a training part and a validation part.

    Args:
        source: Origin of the text, for records.
        train: Bytes of the training part, UTF-8 as a rule.
        heldout: Bytes of the validation part.
        book_bytes: Lengths of the books of the training part, in its order. Books are the files of
            a folder or of the standard library; any other text is one book.
    """

    source: str
    train: bytes
    heldout: bytes
    book_bytes: tuple[int, ...]


def load_corpus(source: str | None) -> Corpus:
    """Read the text of a given source.

    Args:
        source: None for the prose in the docstrings of Python's standard library, a book for each
            of its files; ``hf:NAME`` or ``hf:NAME:CONFIGURATION`` for a Hugging Face data set;
            otherwise a path. The path leads to a text file, or to a folder with books as ``.txt``
            files, in the order of their names. Every 20th book of a folder is for validation, or
            the last one of fewer. Of any other text, the last 5 % are, or up to 10 % from the end
            of a line or word.

    Raises:
        DataError: The text does not exist, cannot be read, is empty, is no UTF-8, has more than
            2^30 bytes, or has a validation part longer than the training part.
    """
    if source is None:
        corpus = _load_stdlib(Path(sysconfig.get_path("stdlib")))
    elif source.startswith(HUB_PREFIX):
        corpus = _load_hub(source)
    elif not source:
        raise DataError(f"text data '' is no path; {_EXPECTED}")
    # Unlike Path.is_dir, it raises for no name, however long.
    elif os.path.isdir(source):
        corpus = _load_folder(Path(source))
    else:
        corpus = _load_file(Path(source))
    if not corpus.train or not corpus.heldout:
        raise DataError(f"text data {corpus.source}: the training or the validation part is empty")
    if len(corpus.heldout) > len(corpus.train):
        raise DataError(
            f"text data {corpus.source}: {len(corpus.train):,} bytes to train on, and "
            f"{len(corpus.heldout):,} to validate; expected no fewer to train on. Of a folder, "
            f"every {_HELDOUT_EVERY}th book by name validates, or the last one: rename or join "
            f"books"
        )
    return corpus


def _load_stdlib(folder: Path) -> Corpus:
    """Take each paragraph of prose once, a line for each: 0.4 million bytes of 63 characters."""
    seen: set[str] = set()
    texts: list[bytes] = []
    for path in _list_sources(folder):
        docstrings = _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace"))
        parts = [" ".join(part.split()) for text in docstrings for part in text.split("\n\n")]
        new = [part for part in dict.fromkeys(parts) if part not in seen and _PROSE.fullmatch(part)]
        seen.update(new)
        if new:
            texts.append("".join(f"{part}\n" for part in new).encode())
    return _hold_out_books("prose of Python's standard library", texts)


def _hold_out_books(source: str, texts: Sequence[bytes]) -> Corpus:
    """Split by whole files, so that no half of a file helps to predict its other half."""
    every = min(_HELDOUT_EVERY, max(1, len(texts)))
    train = [text for index, text in enumerate(texts) if index % every != every - 1]
    heldout = texts[every - 1 :: every]
    return Corpus(source, b"".join(train), b"".join(heldout), tuple(map(len, train)))


def _list_sources(folder: Path) -> list[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _load_folder(folder: Path) -> Corpus:
    files = sorted(path for path in folder.glob(BOOK_PATTERN) if path.is_file())
    if len(files) < 2:
        raise DataError(
            f"text data {str(folder)!r}: a folder needs two or more files {BOOK_PATTERN}, one of "
            f"them for validation; found {len(files)}"
        )
    books: list[bytes] = []
    left_bytes = FILE_BYTES
    for path in files:
        books.append(_read_text(path, limit_bytes=left_bytes))
        left_bytes -= len(books[-1])
    return _hold_out_books(str(folder), books)


def _load_file(path: Path) -> Corpus:
    return _split_near_end(str(path), _read_text(path, limit_bytes=FILE_BYTES))


def _read_text(path: Path, *, limit_bytes: int) -> bytes:
    named = f"text data {_shorten(str(path))!r}"
    try:
        text = read_plain_file(path, limit_bytes=limit_bytes)
    except DataError as error:
        raise DataError(f"{named} cannot be read ({error}); {_EXPECTED}") from error
    _check_text(named, text)
    return text


def _shorten(path: str) -> str:
    """Shorten what may be a whole text in place of its path."""
    return path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}..."


def _check_text(named: str, text: bytes) -> None:
    """Refuse what is no UTF-8; a last character may be cut off.

    Raises:
        DataError: It is binary, or in another encoding.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    at, kept = text.find(0), 0
    try:
        for begin in range(0, len(text) if at < 0 else 0, _CHUNK_BYTES):
            # The decoder counts from the first byte of a character that the last chunk began.
            kept = len(decoder.getstate()[0])
            decoder.decode(text[begin : begin + _CHUNK_BYTES])
    except UnicodeDecodeError as error:
        at = begin - kept + error.start
    if at >= 0:
        raise DataError(
            f"{named} is no UTF-8 text: it has byte 0x{text[at]:02x} near position {at:,}; "
            f"convert it, such as by: iconv -f UTF-16 -t UTF-8"
        )


def _split_near_end(source: str, text: bytes) -> Corpus:
    """Take the last part for validation, from a line end, a word or a character before it.

    A line end or space counts if the part grows at most to twice its share, so that a long last
    line is cut.
    """
    wanted = int(len(text) * (1 - HELDOUT_SHARE))
    least = wanted - int(len(text) * HELDOUT_SHARE)
    cut = text.rfind(b"\n", least, wanted) + 1 or text.rfind(b" ", least, wanted) + 1
    if not cut:
        cut = wanted
        # A character's further bytes are 10xxxxxx.
        while cut > least and text[cut] & 0xC0 == 0x80:
            cut -= 1
    return _one_book(source, text[:cut], text[cut:])


def _one_book(source: str, train: bytes, heldout: bytes) -> Corpus:
    return Corpus(source, train, heldout, (len(train),))


def _load_hub(source: str) -> Corpus:
    name, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    splits = _open_hub(name, configuration or None)
    if "train" not in splits:
        raise DataError(f"data set {source} has no split 'train', only {sorted(splits)}")
    train = _join_rows(splits["train"], source)
    for split in ("validation", "test"):
        if split in splits:
            return _one_book(source, train, _join_rows(splits[split], source))
    return _split_near_end(source, train)


def _open_hub(name: str, configuration: str | None) -> dict[str, Dataset]:
    """Open a data set of the hub, a folder of data files, or a folder from ``save_to_disk``."""
    import datasets  # imported on demand: it costs a second, and most runs do not need it

    # It logs retries as lines about sockets; we report their outcome in one line.
    chatter = logging.getLogger("huggingface_hub")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        folder = Path(name)
        if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            opened: Any = datasets.load_from_disk(name)
        else:
            opened = datasets.load_dataset(name, configuration)
    # Besides its own errors, the hub's client passes on its HTTP library's errors.
    except Exception as error:
        said = " ".join(str(error).split()) or repr(error)
        raise DataError(f"data set {HUB_PREFIX}{name} cannot be opened: {said}") from error
    finally:
        chatter.setLevel(level)
    return {"train": opened} if isinstance(opened, datasets.Dataset) else dict(opened)


def _join_rows(rows: Dataset, source: str) -> bytes:
    texts = rows[_find_text_column(rows, source)]
    return b"\n".join(_take_bytes(texts, HUB_BYTES))


def _find_text_column(rows: Dataset, source: str) -> str:
    columns: list[str] = [
        name
        for name, feature in rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if "text" in columns:
        return "text"
    if len(columns) == 1:
        return columns[0]
    raise DataError(
        f"data set {source}: expected a column 'text' or a single one of strings, found {columns}"
    )


def _take_bytes(texts: Iterable[str | None], limit_bytes: int) -> Iterable[bytes]:
    size = 0
    for text in texts:
        encoded = (text or "").encode(errors="replace")
        yield encoded
        size += len(encoded)
        if size >= limit_bytes:
            return

"""Texts to train on: the standard library's source, files, or a Hugging Face data set."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlion.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]

# Enough for several epochs of the default run; keeps start-up below a second.
STDLIB_BYTES = 4_000_000
# A hub data set can be larger than memory; rows beyond this many bytes are left out.
HUB_BYTES = 64_000_000
HUB_PREFIX = "hf:"
BOOK_PATTERN = "*.txt"
HELDOUT_SHARE = 0.05
_HELDOUT_EVERY = round(1 / HELDOUT_SHARE)
# Tests, generated tables and bundled packages say little about the language.
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
        source: None for the Python standard library's source; ``hf:NAME`` or
            ``hf:NAME:CONFIGURATION`` for a Hugging Face data set; otherwise a path. The path leads
            to a text file, or to a folder with books as ``.txt`` files, in the order of their
            names. Every 20th book of a folder is for validation, or the last one of fewer.

    Raises:
        DataError: The text does not exist, cannot be read, or is empty.
        MissingDependencyError: ``hf:`` was given and ``datasets`` is not installed.
    """
    if source is None:
        corpus = _load_stdlib(Path(sysconfig.get_path("stdlib")))
    elif source.startswith(HUB_PREFIX):
        corpus = _load_hub(source)
    elif (path := Path(source)).is_dir():
        corpus = _load_folder(path)
    else:
        corpus = _load_file(path)
    if not corpus.train or not corpus.heldout:
        raise DataError(f"text data {corpus.source}: the training or the validation part is empty")
    return corpus


def _load_stdlib(folder: Path) -> Corpus:
    texts: list[bytes] = []
    size = 0
    for path in _list_sources(folder):
        if size >= STDLIB_BYTES:
            break
        texts.append(path.read_bytes())
        size += len(texts[-1])
    return _hold_out_books("Python standard library", texts)


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
    return _hold_out_books(str(folder), [_read_text(path) for path in files])


def _load_file(path: Path) -> Corpus:
    return _split_at_line(str(path), _read_text(path))


def _read_text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"text data {str(path)!r} cannot be read ({error.strerror}); give the path of a text "
            f"file or of a folder of {BOOK_PATTERN}, {HUB_PREFIX}NAME, or nothing for the Python "
            f"standard library's source"
        ) from error


def _split_at_line(source: str, text: bytes) -> Corpus:
    """Take the last part for validation, beginning after a line end if there is one."""
    wanted = int(len(text) * (1 - HELDOUT_SHARE))
    cut = text.rfind(b"\n", 0, wanted) + 1 or wanted
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
    return _split_at_line(source, train)


def _open_hub(name: str, configuration: str | None) -> dict[str, Dataset]:
    """Open a data set of the hub, a folder of data files, or a folder from ``save_to_disk``."""
    try:
        import datasets  # imported on demand: it costs a second, and most runs do not need it
    except ImportError as error:
        raise MissingDependencyError(
            f"{HUB_PREFIX}{name} needs the package 'datasets': pip install \"distlion[train]\""
        ) from error
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

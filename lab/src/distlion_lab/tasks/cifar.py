"""Read CIFAR-10 in its standard python-batches folder, without trusting its pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distlion_lab.errors import DataError
from distlion_lab.plain_file import read_plain_file
from distlion_lab.tasks.plain_pickle import build_bytes_array, read_plain_pickle

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
IMAGE_SIZE = 32
CHANNELS = 3
CLASSES = 10
# A batch of the standard folder has 31 million bytes.
_MOST_BYTES = 1 << 29

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def read_cifar10(folder: Path) -> tuple[Images, Labels, Images, Labels]:
    """Read the folder ``cifar-10-batches-py``.

    Returns:
        Training images (n, 3, 32, 32) uint8, their classes (n,) int64; the same for the test batch.

    Raises:
        DataError: A file is missing, not in the standard layout, or asks for more than arrays.
    """
    parts = [_read_batch(folder / name) for name in TRAIN_FILES]
    train_images = np.concatenate([images for images, _ in parts])
    train_labels = np.concatenate([labels for _, labels in parts])
    return train_images, train_labels, *_read_batch(folder / TEST_FILE)


def _read_batch(path: Path) -> tuple[Images, Labels]:
    try:
        data = read_plain_file(path, limit_bytes=_MOST_BYTES)
    except DataError as error:
        raise DataError(
            f"image data {str(path)!r} cannot be read ({error}); expected the "
            f"standard folder of CIFAR-10 with {', '.join(TRAIN_FILES)} and {TEST_FILE}"
        ) from error
    try:
        content = read_plain_pickle(data)
    except DataError as error:
        raise DataError(f"image data {str(path)!r} is refused: {error}") from error
    return _check_batch(path, content)


def _check_batch(path: Path, content: Any) -> tuple[Images, Labels]:
    fields = content if isinstance(content, dict) else {}
    images, labels = build_bytes_array(fields.get(b"data")), fields.get(b"labels")
    pixels = CHANNELS * IMAGE_SIZE * IMAGE_SIZE
    found: Any
    if images is None or images.ndim != 2 or images.shape[1] != pixels:
        found = type(fields.get(b"data")).__name__ if images is None else images.shape
        raise DataError(
            f"image data {str(path)!r}: b'data' must be an array of (n, {pixels}) uint8; got "
            f"{found}"
        )
    if not isinstance(labels, list) or len(labels) != len(images):
        found = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise DataError(
            f"image data {str(path)!r}: b'labels' must be a list of {len(images)} classes; got "
            f"{found}"
        )
    if not all(isinstance(label, int) and 0 <= label < CLASSES for label in labels):
        raise DataError(f"image data {str(path)!r}: b'labels' must be integers below {CLASSES}")
    shape = (len(images), CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    return images.reshape(shape), np.array(labels, dtype=np.int64)

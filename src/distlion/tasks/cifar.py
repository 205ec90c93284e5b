"""Read CIFAR-10 in its standard python-batches folder, without trusting its pickles."""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from distlion.errors import DataError

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
IMAGE_SIZE = 32
CHANNELS = 3
CLASSES = 10

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which protocol 2 writes bytes, with that one encoding."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not admitted")
    return codecs.latin_1_encode(text)[0]


def _array_constructor() -> Callable[..., Any]:
    rebuild: Callable[..., Any] = np.empty(0, dtype=np.uint8).__reduce__()[0]  # type: ignore[assignment]
    return rebuild


# All that a dictionary of bytes, numbers and plain arrays needs; numpy renamed its module in 2.0.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _array_constructor(),
    ("numpy._core.multiarray", "_reconstruct"): _array_constructor(),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode_latin1,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Admit arrays, bytes, numbers, lists and dictionaries; refuse every other name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def load_arrays(file: BinaryIO) -> Any:
    """Unpickle arrays, bytes, numbers, lists and dictionaries.

    Raises:
        pickle.UnpicklingError: The pickle asks for any other name, such as ``os.system``.
    """
    return _ArrayUnpickler(file, encoding="bytes").load()


def read_cifar10(folder: Path) -> tuple[Images, Labels, Images, Labels]:
    """Read the folder ``cifar-10-batches-py``.

    Returns:
        Training images (n, 3, 32, 32) uint8, their classes (n,) int64; the same of the test batch.

    Raises:
        DataError: A file is missing, not in the standard layout, or asks for more than arrays.
    """
    parts = [_read_batch(folder / name) for name in TRAIN_FILES]
    train_images = np.concatenate([images for images, _ in parts])
    train_labels = np.concatenate([labels for _, labels in parts])
    return train_images, train_labels, *_read_batch(folder / TEST_FILE)


def _read_batch(path: Path) -> tuple[Images, Labels]:
    try:
        with path.open("rb") as file:
            content = load_arrays(file)
    except OSError as error:
        raise DataError(
            f"image data {str(path)!r} cannot be read ({error.strerror}); expected the "
            f"standard folder of CIFAR-10 with {', '.join(TRAIN_FILES)} and {TEST_FILE}"
        ) from error
    # Damaged opcodes make the unpickler fail in any way; no name that is not admitted is called.
    except Exception as error:
        said = " ".join(str(error).split())
        raise DataError(f"image data {str(path)!r} is refused: {said or repr(error)}") from error
    return _check_batch(path, content)


def _check_batch(path: Path, content: Any) -> tuple[Images, Labels]:
    fields = content if isinstance(content, dict) else {}
    images, labels = fields.get(b"data"), fields.get(b"labels")
    pixels = CHANNELS * IMAGE_SIZE * IMAGE_SIZE
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 2:
        found = getattr(images, "dtype", type(images).__name__)
        raise DataError(f"image data {str(path)!r}: expected (n, {pixels}) uint8, got {found}")
    if images.shape[1] != pixels or not isinstance(labels, list) or len(labels) != len(images):
        found = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise DataError(
            f"image data {str(path)!r}: b'data' must be (n, {pixels}) and b'labels' a list of n "
            f"classes; got {images.shape} and {found}"
        )
    if not all(isinstance(label, int) and 0 <= label < CLASSES for label in labels):
        raise DataError(f"image data {str(path)!r}: b'labels' must be integers below {CLASSES}")
    shape = (len(images), CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    return images.reshape(shape), np.array(labels, dtype=np.int64)

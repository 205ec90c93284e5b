"""One file of tensors in safetensors format: hashed when written, checked before it is read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlion.errors import CheckpointError
from distlion.step.gradients import warn_user
from distlion.step.param import is_wrapper, view_row

# https://github.com/huggingface/safetensors#format
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RESERVED = "__metadata__"
"""Name in a header that the format keeps for text."""
_CHUNK_BYTES = 1 << 22
_INSTALL = "pip install safetensors"
_has_warned = False
# A link could lead out of the folder, and a pipe would block.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class FileRecord:
    """A manifest's record of a file.

    Attributes:
        n_bytes: Its size.
        sha256: Digest of its bytes, in hexadecimal digits.
    """

    n_bytes: int
    sha256: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    reached: Callable[[str], None],
) -> FileRecord:
    """Write a new file and flush it to the disk.

    The safetensors library writes from a copy of all tensors, and hashing would have to read its
    file again; here each tensor is hashed as it is written.

    Args:
        path: Path of the file, which must not exist.
        tensors: Dense tensors of any device and strides.
        reached: Function called at each place where a crash may leave the file.

    Raises:
        CheckpointError: A tensor's dtype or layout cannot be written, or the disk refuses.
    """
    header = _encode_header(tensors)
    digest, n_bytes = hashlib.sha256(), 0
    try:
        with path.open("xb") as file:
            for part in (len(header).to_bytes(8, "little"), header):
                n_bytes += file.write(part)
                digest.update(part)
            reached(f"began {path.name}")
            for name, tensor in tensors.items():
                if tensor.numel():
                    row = memoryview(_bytes_of(tensor))
                    n_bytes += file.write(row)
                    digest.update(row)
                    reached(f"wrote {name} of {path.name}")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise refuse_disk(path, error) from error
    reached(f"finished {path.name}")
    return FileRecord(n_bytes, digest.hexdigest())


def _bytes_of(tensor: Tensor) -> Any:
    return view_row(tensor.detach().resolve_neg().contiguous(), torch.uint8).cpu().numpy()


def refuse_disk(path: Path, error: OSError) -> CheckpointError:
    """Make the error for a failed write."""
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}")


def _encode_header(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Check that a tensor can be written.

    Raises:
        CheckpointError: Its dtype or layout has no form in the file, it has no values, or the file
            keeps its name for something else.
    """
    check_dense(name, tensor)
    if is_wrapper(tensor):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors. Expected a plain "
            "tensor. If it is not trained and equal on all workers, only_trained=True leaves it out"
        )
    if tensor.dtype not in _DTYPES:
        raise _refuse_tensor(name, tensor)
    if name == _RESERVED:
        raise CheckpointError(
            f"a tensor is named {name!r}, which the safetensors format keeps for itself. Rename it"
        )


def check_dense(name: str, tensor: Tensor) -> None:
    """Check that a tensor has values, one beside the other, so that its bits can be read.

    Raises:
        CheckpointError: It has not.
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not is_dense or tensor.is_meta:
        raise _refuse_tensor(name, tensor)


def _refuse_tensor(name: str, tensor: Tensor) -> CheckpointError:
    kind = "a nested tensor" if tensor.is_nested else "a tensor"
    return CheckpointError(
        f"{name} is {kind} of {tensor.dtype}, {tensor.layout}, on {tensor.device}; a "
        "checkpoint holds dense ones of floating-point numbers, signed integers, uint8 or bool"
    )


def check_file(path: Path, record: FileRecord) -> None:
    """Check a file's size and SHA-256 before anything parses it.

    Raises:
        CheckpointError: It is missing, not a plain file, or not as written; names it.
    """
    digest = hashlib.sha256()
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise CheckpointError(f"{path} is not a plain file")
            if state.st_size != record.n_bytes:
                raise CheckpointError(
                    f"{path} has {state.st_size:,} bytes, {record.n_bytes:,} were written: it was "
                    "cut off or replaced"
                )
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise refuse_to_read(path, error) from error
    if digest.hexdigest() != record.sha256:
        raise CheckpointError(f"{path} was damaged since it was written: its SHA-256 differs")


def refuse_to_read(path: Path, error: OSError) -> CheckpointError:
    """Make the error for a file that cannot be read."""
    hint = ""
    if isinstance(error, FileNotFoundError):
        hint = "; does every host see the folder, and was it written on this one?"
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{hint}")


def warn_if_unreadable() -> None:
    """Warn, once in a process, that the package that reads checkpoints is missing."""
    global _has_warned
    try:
        is_there = find_spec("safetensors") is not None
    except ValueError:  # a module that somebody put in its place
        is_there = True
    if is_there or _has_warned:
        return
    _has_warned = True
    warn_user(
        "checkpoints are written without the safetensors package, but reading them needs it, and "
        f"it is not installed here. Install it before you need them: {_INSTALL}",
        UserWarning,
    )


class TensorFile:
    """A checked file, open for reading.

    Args:
        path: Its path.
        stack: Stack that closes it.

    Raises:
        CheckpointError: The safetensors package is missing, or refuses the file.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise CheckpointError(
                f"checkpoints are read with the safetensors package; install it with {_INSTALL}"
            ) from error
        try:
            self._file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        self.path = path
        self._taken: set[str] = set()
        self.names: set[str] = set(self._file.keys())

    def read(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: The file has no such tensor, or torch lacks its type.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path} holds no {name!r}")
        try:
            tensor: Tensor = self._file.get_tensor(name)
        # Besides its own errors, the package passes on torch's.
        except Exception as error:
            raise CheckpointError(f"{self.path}: {name!r} cannot be read ({error})") from error
        return tensor

    def take(self, name: str) -> Tensor:
        """Read a tensor for the caller to keep, unmapped, as the file may be removed.

        Raises:
            CheckpointError: As for ``read``; or it was taken before: a small file could name one
                tensor a million times.
        """
        if name in self._taken:
            raise CheckpointError(f"{self.path} names {name!r} twice; expected it once")
        self._taken.add(name)
        return self.read(name).clone()

"""The folder of a run's checkpoints: names, atomic renames, and which one is the latest.

- ``latest``: the name of the newest complete checkpoint, with its sum
- ``step-000000001000/``: complete, as it gets this name once all of it is on the disk

  - ``manifest.json``: size and SHA-256 of each file
  - ``model-00000.safetensors``: tensors that are equal on all processes; each writes a share
  - ``process-00000.safetensors``: the state of one process: buffers, groups, extra
  - ``worker-00000.safetensors``: the momenta of one worker

- ``partial-step-...``: under way, or left by a crash; never read
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

from distlion.checkpoint.tensor_file import READ_FLAGS, refuse_disk, refuse_to_read
from distlion.errors import CheckpointError

logger = logging.getLogger("distlion")

LATEST = "latest"
PARTIAL = "partial-"
_COMPLETE = re.compile(r"step-(\d{12})(?:\.(\d{1,6}))?")
_LATEST_BYTES = 64


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk.

    Raises:
        CheckpointError: The disk refuses.
    """
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise refuse_disk(path, error) from error


def list_complete(root: Path) -> list[str]:
    """List the names of complete checkpoints, the oldest step first."""
    names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    return sorted((name for name in names if _COMPLETE.fullmatch(name)), key=_order)


def _order(name: str) -> tuple[int, int]:
    match = _COMPLETE.fullmatch(name)
    assert match is not None  # callers have checked
    return int(match[1]), int(match[2] or 0)


def choose_name(root: Path, step: int) -> str:
    """Choose the name of a new checkpoint.

    If the step was saved before, by a run that then resumed from an earlier one, the old folder
    stays and the new one gets a number.
    """
    plain = f"step-{step:012d}"
    taken = [_order(name)[1] for name in list_complete(root) if _order(name)[0] == step]
    return f"{plain}.{max(taken) + 1}" if taken else plain


def write_pointer(partial: Path, name: str) -> None:
    """Write the future ``latest`` beside a folder, while a full disk does no harm yet.

    Raises:
        CheckpointError: The disk refuses.
    """
    write_file(_pointer_of(partial), encode_latest(name))


def _pointer_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.{LATEST}")


def publish(partial: Path, name: str, reached: Callable[[str], None]) -> Path:
    """Give a complete folder its final name, and make it the latest.

    Args:
        partial: The folder.
        name: Its name from now on.
        reached: Function called at each place where a crash may leave the folders.

    Raises:
        CheckpointError: The disk refuses.
    """
    root, final = partial.parent, partial.with_name(name)
    try:
        sync_folder(partial)
        reached("synced the folder")
        os.rename(partial, final)
        sync_folder(root)
        reached("renamed the folder")
        os.replace(_pointer_of(partial), root / LATEST)
        reached("replaced latest")
        sync_folder(root)
    except OSError as error:
        raise refuse_disk(final, error) from error
    return final


def discard(partial: Path) -> None:
    """Remove the files of a failed save."""
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):
        _pointer_of(partial).unlink(missing_ok=True)


def encode_latest(name: str) -> bytes:
    """Write a name with a checksum: a flipped bit must not turn it into another step's."""
    return f"{name} {zlib.crc32(name.encode()):08x}\n".encode()


def prune(root: Path, *, keep_last: int | None, own: Path, under_way: Collection[Path]) -> None:
    """Remove leftovers of crashed saves, and all but the newest complete checkpoints.

    A folder that cannot be removed stays, with a line in the log: the new checkpoint is safe.

    Args:
        root: The run's folder.
        keep_last: Number of checkpoints to keep; None for all.
        own: The newest, which stays.
        under_way: Folders that saves of this process are still writing to.
    """
    busy = {folder.name for folder in under_way}
    try:
        for entry in list(os.scandir(root)):
            name = entry.name.removesuffix(f".{LATEST}")
            if name.startswith(f"{PARTIAL}step-") and name not in busy:
                discard(root / name)
        if keep_last is None:
            return
        # By age: a run that resumed from an earlier step leaves folders of later steps.
        others = [root / name for name in list_complete(root) if name != own.name]
        others.sort(key=lambda folder: folder.stat().st_mtime_ns)
        for folder in others[: max(0, len(others) - keep_last + 1)]:
            # A folder that is half removed must not look like a checkpoint.
            hidden = root / f"{PARTIAL}{folder.name}"
            os.rename(folder, hidden)
            discard(hidden)
    except OSError as error:
        logger.warning("earlier checkpoints in %s could not be removed: %s", root, error)


def _describe_absence(path: Path) -> str:
    if not path.exists():
        return (
            f"the folder {path} does not exist; expected the folder of a run's checkpoints or of "
            "one checkpoint, step-.... Check the name, and that this machine has the folder"
        )
    if not path.is_dir():
        return f"{path} is a file; expected the folder of a run's checkpoints or of one checkpoint"
    return (
        f"{path / LATEST} is missing, so no checkpoint is complete in {path}; expected the folder "
        "of a run's checkpoints or of one checkpoint, step-..."
    )


def find_checkpoint(path: Path) -> Path:
    """Return the folder of one checkpoint: ``path`` itself, or the latest of a run's folder.

    Raises:
        CheckpointError: There is none.
    """
    if _COMPLETE.fullmatch(path.name):
        if not os.path.lexists(path):
            raise CheckpointError(_describe_absence(path))
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(f"{path} is not the folder of a checkpoint")
        return path
    point = path / LATEST
    if not os.path.lexists(point):
        raise CheckpointError(_describe_absence(path))
    try:
        with os.fdopen(os.open(point, READ_FLAGS), "rb") as file:
            data = file.read(_LATEST_BYTES)
    except OSError as error:
        raise refuse_to_read(point, error) from error
    name = data.decode("ascii", errors="replace").split(" ")[0]
    if encode_latest(name) != data or not _COMPLETE.fullmatch(name):
        raise CheckpointError(
            f"{point} was damaged; name the checkpoint itself: {path / 'step-...'}"
        )
    found = path / name
    if found.is_symlink() or not found.is_dir():
        raise CheckpointError(f"{found}, which {point} names, is missing")
    return found

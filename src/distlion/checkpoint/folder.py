"""The folder of a run's checkpoints: names, atomic renames, which one is the latest, its manifest.

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
import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlion.checkpoint.tensor_file import READ_FLAGS, FileRecord, refuse_disk, refuse_to_read
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
    return sorted((name for name in names if is_name(name)), key=_order)


def is_name(name: str) -> bool:
    """Return whether a folder of this name is one checkpoint."""
    return _COMPLETE.fullmatch(name) is not None


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


def remove_leftovers(root: Path, *, under_way: Collection[Path]) -> None:
    """Remove what crashed saves have left, so that a small disk has room for the next one.

    Args:
        root: The run's folder.
        under_way: Folders that saves of this process are still writing to.
    """
    busy = {folder.name for folder in under_way}
    with contextlib.suppress(OSError):  # a folder that cannot be read fails the save itself
        for entry in list(os.scandir(root)):
            name = entry.name.removesuffix(f".{LATEST}")
            if name.startswith(f"{PARTIAL}step-") and name not in busy:
                discard(root / name)


def prune(root: Path, *, keep_last: int | None, own: Path) -> None:
    """Remove all but the newest complete checkpoints.

    A folder that cannot be removed stays, with a line in the log: the new checkpoint is safe.

    Args:
        root: The run's folder.
        keep_last: Number of checkpoints to keep; None for all.
        own: The newest, which stays.
    """
    if keep_last is None:
        return
    try:
        # By age: a run that resumed from an earlier step leaves folders of later steps.
        others = [root / name for name in list_complete(root) if name != own.name]
        others.sort(key=_find_age)
        for folder in others[: max(0, len(others) - keep_last + 1)]:
            # A folder that is half removed must not look like a checkpoint.
            hidden = root / f"{PARTIAL}{folder.name}"
            os.rename(folder, hidden)
            discard(hidden)
    except OSError as error:
        logger.warning("earlier checkpoints in %s could not be removed: %s", root, error)


def _find_age(folder: Path) -> int:
    """Return the time of a checkpoint's manifest: the folder's moves with each file put into it."""
    manifest = folder / MANIFEST
    return (manifest if manifest.exists() else folder).stat().st_mtime_ns


def _describe_absence(path: Path) -> str:
    try:
        os.lstat(path / LATEST)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # such as a folder that may not be entered
        return f"{path} cannot be read: {error.strerror}"
    if not path.exists():
        return (
            f"the folder {path} does not exist; expected the folder of a run's checkpoints or of "
            "one checkpoint, step-.... Check the name, and that this machine has the folder"
        )
    if not path.is_dir():
        return f"{path} is a file; expected the folder of a run's checkpoints or of one checkpoint"
    if (path / MANIFEST).exists():
        return (
            f"{path} has the files of one checkpoint, whose folder had another name when it was "
            "saved; expected step-... and 12 digits. Rename it, such as to step-000000000900"
        )
    return (
        f"{path / LATEST} is missing, so no checkpoint is complete in {path}; expected the folder "
        "of a run's checkpoints or of one checkpoint, step-..."
    )


def find_checkpoint(path: Path) -> Path:
    """Return the folder of one checkpoint: ``path`` itself, or the latest of a run's folder.

    Raises:
        CheckpointError: There is none.
    """
    if is_name(path.name):
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
    if encode_latest(name) != data or not is_name(name):
        raise CheckpointError(
            f"{point} was damaged; name the checkpoint itself: {path / 'step-...'}"
        )
    found = path / name
    if found.is_symlink() or not found.is_dir():
        raise CheckpointError(f"{found}, which {point} names, is missing")
    return found


MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the files, increased whenever another version could misread them.

Format 1 had neither an identity nor, beside the groups, the number of parameters in each.
"""

_READABLE = (1, FORMAT)

_MOST_BYTES = 1 << 26
_FILE_NAME = re.compile(r"(model|process|worker)-\d{5}\.safetensors")
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        format: Format of the files.
        distlion, torch: Versions that wrote it.
        step: Number of committed steps.
        workers: Number of workers whose momenta it holds.
        node_size: Workers that voted as one.
        processes: Number of processes that wrote it.
        seed: Seed of the optimizer's coins.
        layout: SHA-256 of the optimizer's parameters: names, shapes, dtypes.
        leaders: For each process, the lowest process that wrote to the same folder. Each folder
            holds the whole model, in the parts that its processes wrote.
        files: Each file by name.
        identity: Identity of the optimizer that saved it; "" in format 1.
        continues: Identities of optimizers whose checkpoints that one had loaded, and of those that
            they had. Written only where there are any.
        coins: Version of its coins. Written only from 2 on, so that earlier versions of distlion
            read what they can continue.
    """

    format: int
    distlion: str
    torch: str
    step: int
    workers: int
    node_size: int
    processes: int
    seed: int
    layout: str
    leaders: list[int]
    files: dict[str, FileRecord]
    identity: str = ""
    continues: list[str] = field(default_factory=list)
    coins: int = 1

    @property
    def n_voters(self) -> int:
        """Number of workers that voted, or of nodes, if there were any."""
        return self.workers // self.node_size

    @property
    def identities(self) -> frozenset[str]:
        """Identities that whoever loads it may continue; "" in format 1."""
        return frozenset({self.identity, *self.continues})

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.n_bytes for record in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of the whole manifest."""
        return _sum_of(self._describe())

    def encode(self) -> bytes:
        """Encode it as canonical JSON with its own checksum, so that any damage shows."""
        content = self._describe()
        return _canonical({"content": content, "sha256": _sum_of(content)})

    def _describe(self) -> dict[str, Any]:
        content = asdict(self)
        if self.coins == 1:
            del content["coins"]
        if not self.continues:
            del content["continues"]
        return content


def _canonical(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _sum_of(content: Any) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of a version that this one cannot read.
    """
    path = folder / MANIFEST
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise refuse_to_read(path, error) from error
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Parse the result of ``Manifest.encode``; errors name ``path``.

    Raises:
        CheckpointError: It is not a valid manifest.
    """
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
        whole = json.loads(data)
        content = whole["content"]
        if _canonical(whole) != data or whole["sha256"] != _sum_of(content):
            raise ValueError("its checksum differs")
        if content["format"] not in _READABLE:
            raise CheckpointError(
                f"{path} is of format {content['format']!r}, written by distlion "
                f"{content['distlion']!r}; this version reads formats "
                f"{' and '.join(map(str, _READABLE))}"
            )
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
        _check(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} was damaged, or is not a manifest ({error})") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Check values that a forged manifest might hold."""
    least = {"step": 0, "workers": 1, "node_size": 1, "processes": 1, "seed": 0, "coins": 1}
    for name, lowest in least.items():
        value = getattr(manifest, name)
        if type(value) is not int or not lowest <= value < 1 << 64:
            raise ValueError(f"{name} = {value!r}")
    if manifest.workers % manifest.node_size:
        raise ValueError(f"{manifest.workers} workers in nodes of {manifest.node_size}")
    if not re.fullmatch("" if manifest.format == 1 else _IDENTITY, manifest.identity):
        raise ValueError(f"identity {manifest.identity!r}")
    if type(manifest.continues) is not list or not all(
        type(each) is str and _IDENTITY.fullmatch(each) for each in manifest.continues
    ):
        raise ValueError(f"continues {manifest.continues!r}")
    everybody = range(manifest.processes)
    if len(manifest.leaders) != manifest.processes or not set(manifest.leaders) <= set(everybody):
        raise ValueError(f"leaders {manifest.leaders!r}")
    if not _expect(manifest) <= set(manifest.files):
        raise ValueError("files of some workers or processes are not listed")
    for name, record in manifest.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a file named {name!r}")
        if type(record.n_bytes) is not int or not _SHA256.fullmatch(record.sha256):
            raise ValueError(f"no size and sum of {name}")


def _expect(manifest: Manifest) -> set[str]:
    """Return the files that there must be; never more than the manifest lists."""
    most = len(manifest.files) + 1
    return {f"worker-{number:05d}.safetensors" for number in range(min(manifest.workers, most))} | {
        f"process-{number:05d}.safetensors" for number in range(min(manifest.processes, most))
    }

"""The manifest: a list of a checkpoint's files, with size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distlion.checkpoint.tensor_file import READ_FLAGS, FileRecord, refuse_to_read
from distlion.errors import CheckpointError

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

    @property
    def n_voters(self) -> int:
        """Number of workers that voted, or of nodes, if there were any."""
        return self.workers // self.node_size

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.n_bytes for record in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of the whole manifest."""
        return _sum_of(asdict(self))

    def encode(self) -> bytes:
        """Encode it as canonical JSON with its own checksum, so that any damage shows."""
        content = asdict(self)
        return _canonical({"content": content, "sha256": _sum_of(content)})


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
    least = {"step": 0, "workers": 1, "node_size": 1, "processes": 1, "seed": 0}
    for name, lowest in least.items():
        value = getattr(manifest, name)
        if type(value) is not int or not lowest <= value < 1 << 64:
            raise ValueError(f"{name} = {value!r}")
    if manifest.workers % manifest.node_size:
        raise ValueError(f"{manifest.workers} workers in nodes of {manifest.node_size}")
    if not re.fullmatch("" if manifest.format == 1 else _IDENTITY, manifest.identity):
        raise ValueError(f"identity {manifest.identity!r}")
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

"""Change what a checkpoint holds, and sign it again: sums fit, and what it says does not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from distlion.checkpoint.folder import read_manifest
from distlion.checkpoint.tensor_file import FileRecord, write_tensors

PROCESS = "process-00000.safetensors"
Tensors = dict[str, torch.Tensor]


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and have a manifest that fits it."""
    (folder / name).write_bytes(data)
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    forge_manifest(folder, files={**read_manifest(folder).files, name: record})


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Replace what the manifest says."""
    manifest = replace(read_manifest(folder), **changes)
    (folder / "manifest.json").write_bytes(manifest.encode())


def forge_tensors(folder: Path, name: str, change: Callable[[Tensors], Any]) -> None:
    """Let ``change`` edit the tensors of a file."""
    with safe_open(folder / name, "pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).clone() for name in names}
    change(tensors)
    forged = folder / "forged"
    write_tensors(forged, tensors, lambda place: None)
    forge(folder, name, forged.read_bytes())
    forged.unlink()


def forge_tree(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let ``change`` edit what the first process has saved beside tensors."""

    def edit(tensors: Tensors) -> None:
        tree = json.loads(bytes(tensors["tree"].numpy()))
        change(tree)
        text = bytearray(json.dumps(tree).encode())
        tensors["tree"] = torch.frombuffer(text, dtype=torch.uint8)

    forge_tensors(folder, PROCESS, edit)

"""What can happen to the files of a checkpoint."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlion.checkpoint.folder import MANIFEST, read_manifest
from distlion.checkpoint.tensor_file import FileRecord, TensorFile, write_tensors
from distlion.checkpoint.tree import TREE


def damage_checkpoint(folder: Path, kind: str, worker: int) -> None:
    """Damage the only checkpoint in a folder.

    Args:
        folder: Of a run.
        kind: A key of ``DAMAGES``.
        worker: Whose files.
    """
    (step,) = (path for path in folder.glob("step-*") if path.is_dir())
    DAMAGES[kind](step, worker)


def forge(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file, and have a manifest that fits it."""
    path = folder / name
    with ExitStack() as stack:
        file = TensorFile(path, stack)
        tensors = {key: file.read(key).clone() for key in sorted(file.names)}
    change(tensors)
    path.unlink()
    record = write_tensors(path, tensors, lambda where: None)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: record}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).encode())


def forge_trees(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the processes have saved beside tensors."""

    def apply(tensors: dict[str, Tensor]) -> None:
        tree = json.loads(bytes(tensors[TREE].numpy()))
        change(tree)
        tensors[TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)

    for path in folder.glob("process-*"):
        forge(folder, path.name, apply)


def _name(worker: int) -> str:
    return f"worker-{worker:05d}.safetensors"


def _spoil(folder: Path, worker: int) -> None:
    path = folder / _name(worker)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut_off(folder: Path, worker: int) -> None:
    path = folder / _name(worker)
    path.write_bytes(path.read_bytes()[:-1])


def _drop(start: str) -> Callable[[Path, int], None]:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return lambda folder, worker: forge(folder, _name(worker), drop)


def _change_momenta(change: Callable[[Tensor], Tensor]) -> Callable[[Path, int], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = change(tensors[name])

    return lambda folder, worker: forge(folder, _name(worker), apply)


def _change_step(folder: Path, worker: int) -> None:
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_bytes(replace(manifest, step=manifest.step + 3).encode())


def _forge_manifest(**changes: Any) -> Callable[[Path, int], None]:
    def forge_it(folder: Path, worker: int) -> None:
        (folder / MANIFEST).write_bytes(replace(read_manifest(folder), **changes).encode())

    return forge_it


def _set_in_groups(key: str, value: Any) -> Callable[[Path, int], None]:
    def change(tree: dict[str, Any]) -> None:
        for pair in itertools.chain.from_iterable(group["items"] for group in tree["groups"]):
            if pair[0] == key:
                pair[1] = value

    return lambda folder, worker: forge_trees(folder, change)


def _spoil_schedule(tree: dict[str, Any]) -> None:
    tree["scheduler"] = {"$": "dict", "items": [["last_epoch", 3]]}


def _pickle(folder: Path, worker: int) -> None:
    path = folder / _name(worker)
    path.write_bytes(b"\x80\x04N.")
    manifest = read_manifest(folder)
    record = FileRecord(4, hashlib.sha256(path.read_bytes()).hexdigest())
    files = {**manifest.files, path.name: record}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).encode())


DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "a byte": _spoil,
    "cut off": _cut_off,
    "missing": lambda folder, worker: (folder / _name(worker)).unlink(),
    "manifest": lambda folder, worker: (folder / MANIFEST).write_bytes(b"{}"),
    "no estimate": _drop("estimate"),
    "no momentum": _drop("exp_avg"),
    "momentum shape": _change_momenta(lambda each: torch.cat([each.reshape(-1)] * 2)),
    "momentum dtype": _change_momenta(lambda each: each.to(torch.int32)),
    "manifest step": _change_step,
    "manifest seed": _forge_manifest(seed=99),
    "manifest workers": _forge_manifest(workers=99),
    "group step": _set_in_groups("step", 77),
    "group step text": _set_in_groups("step", "abc"),
    "group lr": _set_in_groups("lr", -1.0),
    "group rule": _set_in_groups("aggregation", "Nothing()"),
    "layout": lambda folder, worker: forge_trees(folder, lambda tree: tree["layout"].pop()),
    "schedule": lambda folder, worker: forge_trees(folder, _spoil_schedule),
    "pickle": _pickle,
}
"""Each must be refused."""

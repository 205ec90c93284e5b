"""Checkpoints, whose sums are right again after the damage, and files of tensors alone."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from checkpoint.runs import Run
from distlion import errors
from distlion.checkpoint import verify_checkpoint
from distlion.checkpoint.folder import LATEST, MANIFEST
from distlion.checkpoint.tensor_file import TensorFile
from formats.mutate import mutate_bytes, mutate_json, mutate_json_text

STEP = "step-000000000000"
WORKERS = 2


def split_tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a file in the safetensors format into its header and the bytes of its tensors."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_tensors(header: bytes, rows: bytes) -> bytes:
    """Put a file together."""
    return len(header).to_bytes(8, "little") + header + rows


def mutate_tensors(data: bytes, chance: random.Random) -> bytes:
    """Damage the header's values, its length, or the bytes of a file."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    header, rows = split_tensors(data)
    text = json.dumps(mutate_json(header, chance)).encode()
    return join_tensors(text, rows if chance.random() < 0.8 else mutate_bytes(rows, chance))


class TensorFiles:
    """A file of tensors of all types, each of which is read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "x.safetensors"
        names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
        self._whole = save({name: torch.ones(2, 3, dtype=getattr(torch, name)) for name in names})

    def attempt(self, chance: random.Random) -> None:
        """Damage the file, and read what it has."""
        self._path.write_bytes(mutate_tensors(self._whole, chance))
        with ExitStack() as stack:
            file = TensorFile(self._path, stack)
            for name in file.names:
                file.read(name)


class Checkpoints:
    """A run's folder with a checkpoint, one of whose files is damaged and, mostly, signed anew."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._folder = folder / STEP
        extra = {"epoch": 3, "rng": torch.arange(4), "pair": (1, None), "counts": [1.5, "x"]}
        Run(WORKERS).save(folder, extra)
        self._whole = {path.name: path.read_bytes() for path in self._folder.iterdir()}
        self._latest = (folder / LATEST).read_bytes()
        self._run = Run(WORKERS)
        self._before = self._run.tensors()

    def attempt(self, chance: random.Random) -> None:
        """Damage the folder, load it, and see that a refusal changed nothing."""
        files = self._damage(chance)
        for name, data in files.items():
            (self._folder / name).write_bytes(data)
        if chance.random() < 0.02:
            (self._root / LATEST).write_bytes(mutate_bytes(self._latest, chance))
        try:
            self._load(chance)
        finally:
            (self._root / LATEST).write_bytes(self._latest)
            for name in files:
                (self._folder / name).write_bytes(self._whole[name])

    def _load(self, chance: random.Random) -> None:
        if chance.random() < 0.05:
            verify_checkpoint(self._root)
        try:
            self._run.load(self._root, on_world_change=chance.choice(("raise", "map", "reset")))
        except errors.DistlionError:
            assert self._run.equals(self._before), "a refused load has changed something"
            raise
        loaded, self._run = self._run, Run(WORKERS)
        take_step(loaded)

    def _damage(self, chance: random.Random) -> dict[str, bytes]:
        name = chance.choice(list(self._whole))
        if name == MANIFEST:
            return {MANIFEST: self._damage_manifest(chance)}
        whole = self._whole[name]
        if name.startswith("process") and chance.random() < 0.7:
            damaged = damage_tree(whole, chance)
        else:
            damaged = mutate_tensors(whole, chance)
        if chance.random() < 0.05:
            return {name: damaged}
        manifest = json.loads(self._whole[MANIFEST])
        record = {"n_bytes": len(damaged), "sha256": hashlib.sha256(damaged).hexdigest()}
        manifest["content"]["files"][name] = record
        return {name: damaged, MANIFEST: sign(manifest["content"])}

    def _damage_manifest(self, chance: random.Random) -> bytes:
        if chance.random() < 0.2:
            return mutate_json_text(self._whole[MANIFEST], chance)
        return sign(mutate_json(json.loads(self._whole[MANIFEST])["content"], chance))


def take_step(run: Run) -> None:
    """Take a step with what was loaded; a scheduler may refuse numbers in its own way."""
    for worker in range(WORKERS):
        run.measure_loss(0, worker).backward()
        run.optimizer.collect(worker)
    run.optimizer.step()


def damage_tree(data: bytes, chance: random.Random) -> bytes:
    """Damage the JSON tree inside the tensors of a process."""
    header, rows = split_tensors(data)
    start, stop = header["tree"]["data_offsets"]
    tree = mutate_json_text(rows[start:stop], chance)
    shift = len(tree) - (stop - start)
    for entry in header.values():
        entry["data_offsets"] = [at + shift if at > start else at for at in entry["data_offsets"]]
    header["tree"]["shape"] = [len(tree)]
    return join_tensors(json.dumps(header).encode(), rows[:start] + tree + rows[stop:])


def sign(content: Any) -> bytes:
    """Write a manifest whose sum is right."""

    def encode(value: Any) -> bytes:
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"

    return encode({"content": content, "sha256": hashlib.sha256(encode(content)).hexdigest()})

"""One process's part in writing a checkpoint; the folder gets its name when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Set
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from distlion import faults
from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.contents import Contents
from distlion.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    Manifest,
    choose_name,
    discard,
    prune,
    publish,
    remove_leftovers,
    write_file,
    write_pointer,
)
from distlion.checkpoint.identity import check_owner
from distlion.checkpoint.tensor_file import FileRecord, write_tensors
from distlion.checkpoint.tree import TREE
from distlion.errors import CheckpointError
from distlion.kernels.coin import COINS
from distlion.peers.ownership import MomentumOwnership

_under_way: set[Path] = set()


class Writer:
    """One process's part in writing a checkpoint.

    Args:
        root: The run's folder.
        contents: The state of this process.
        shared: Digests of the model's tensors that are equal on all processes.
        ownership: The momenta that are kept here.
        barrier: Barrier of all processes.
        identity: The optimizer's identity, the same on all processes.
        loaded: The identities whose folder it may continue.
        keep_last: Complete checkpoints to keep; None for all.
        left_out: Names of shared tensors to leave out, which ``contents`` need not have.
        overwrite: Whether to take over the folder of another optimizer.
    """

    def __init__(
        self,
        root: Path,
        contents: Contents,
        shared: dict[str, int],
        ownership: MomentumOwnership,
        barrier: CheckpointBarrier,
        *,
        identity: str,
        loaded: frozenset[str],
        keep_last: int | None,
        left_out: Set[str],
        overwrite: bool,
    ) -> None:
        self._root = root
        self._contents = contents
        self._shared, self._left_out = shared, left_out
        self._ownership = ownership
        self._barrier = barrier
        self._identity, self._loaded = identity, loaded
        self._keep_last = keep_last
        self._overwrite = overwrite

    def write(self) -> Path:
        """Write: 1 make a folder, 2 see who shares it, 3 write, 4 seal, 5 publish, 6 prune.

        What crashed saves have left is removed before anything is written.
        """
        share, process = self._barrier.share, self._ownership.process
        # 1 make a folder
        nonce = share(None, nonce=os.urandom(8).hex())[0]["nonce"]
        folder = self._root / f"{PARTIAL}step-{self._contents.step:012d}-{nonce}"
        _under_way.add(folder)
        try:
            self._barrier.run(partial(self._enter, folder))

            # 2 see who shares it: each host may have its own folder of this name
            view, problem = attempt(lambda: self._see(folder))
            rows = share(problem, leader=None if view is None else view[0])
            leaders = [int(row["leader"]) for row in rows]
            assert view is not None
            if view[0] == process:
                remove_leftovers(self._root, under_way=_under_way)

            # 3 write
            written, problem = attempt(lambda: self._write_files(folder, view))
            files = dict(written or {})
            facts = {name: [each.n_bytes, each.sha256] for name, each in files.items()}
            # A process with many workers knows its files, which may be too many to send.
            rows = share(problem, files=facts if self._ownership.n_processes > 1 else {})
            for row in rows:
                files |= {name: FileRecord(*fact) for name, fact in row["files"].items()}

            # 4 seal: from here on nothing needs disk space
            name, problem = None, None
            if view[0] == process:
                name, problem = attempt(lambda: self._seal(folder, view, leaders, files))
            names = [row["name"] for row in share(problem, name=name)]

            # 5 publish
            problem = None
            if name is not None:
                _, problem = attempt(partial(publish, folder, name, self._reached))
            share(problem)
        except CheckpointError:
            discard(folder)
            raise
        finally:
            _under_way.discard(folder)

        # 6 prune
        own = self._root / str(names[leaders[process]])
        if view[0] == process:
            prune(self._root, keep_last=self._keep_last, own=own)
            self._reached("pruned")
        return own

    def _reached(self, place: str) -> None:
        if faults.armed:
            rank, step = self._ownership.process, self._contents.step
            faults.fire(rank=rank, step=step, point="checkpoint", subject=place)

    def _enter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not self._overwrite:
            identities = {self._identity, *self._loaded}
            check_owner(self._root, identities, self._contents.layout_digest)
        self._reached("made the folder")
        write_file(folder / self._mark(self._ownership.process), b"")
        self._reached("marked the folder")

    def _mark(self, process: int) -> str:
        return f"present-{process:05d}"

    def _see(self, folder: Path) -> list[int]:
        """List the processes that write to this same folder, including this one."""
        return [
            process
            for process in range(self._ownership.n_processes)
            if (folder / self._mark(process)).exists()
        ]

    def _write_files(self, folder: Path, view: list[int]) -> dict[str, FileRecord]:
        contents, process = self._contents, self._ownership.process
        own = {
            f"own.{name}": tensor
            for name, tensor in contents.model.items()
            if name not in self._shared
        }
        tree = {**contents.tree, "own": [name.removeprefix("own.") for name in own]}
        tree["left_out"] = {name: self._shared[name] for name in sorted(self._left_out)}
        text = json.dumps(tree).encode()
        own[TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = {
            f"process-{process:05d}": {**own, **contents.tensors},
            f"model-{process:05d}": self._take_share(view),
        }
        parts |= {f"worker-{worker:05d}": row for worker, row in contents.momenta.items()}
        records = {}
        for name, tensors in parts.items():
            file = f"{name}.safetensors"
            records[file] = write_tensors(folder / file, tensors, self._reached)
        return records

    def _take_share(self, view: list[int]) -> dict[str, Tensor]:
        """Return this process's share of the shared tensors, about equal between processes."""
        names = sorted(self._shared.keys() - self._left_out)
        shared = {name: self._contents.model[name] for name in names}
        load = dict.fromkeys(view, 0)
        mine = {}
        for name, tensor in sorted(shared.items(), key=lambda pair: -pair[1].nbytes):
            process = min(load, key=lambda number: load[number])
            load[process] += tensor.nbytes
            if process == self._ownership.process:
                mine[name] = tensor
        return mine

    def _seal(
        self, folder: Path, view: list[int], leaders: list[int], files: dict[str, FileRecord]
    ) -> str:
        ownership = self._ownership
        manifest = Manifest(
            format=FORMAT,
            distlion=version("distlion"),
            torch=torch.__version__,
            step=self._contents.step,
            workers=ownership.n_workers,
            node_size=ownership.node_size,
            processes=ownership.n_processes,
            seed=ownership.seed,
            layout=self._contents.layout_digest,
            leaders=leaders,
            files=files,
            identity=self._identity,
            continues=sorted(self._loaded),
            coins=COINS,
        )
        write_file(folder / MANIFEST, manifest.encode())
        self._reached("wrote the manifest")
        for process in view:
            (folder / self._mark(process)).unlink()
        name = choose_name(self._root, self._contents.step)
        write_pointer(folder, name)
        self._reached("wrote the pointer")
        return name

"""Saving: every process writes its part; the checkpoint gets its name when all of it is there."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlion import faults
from distlion.checkpoint.contents import Contents, collect, digest_entries
from distlion.checkpoint.council import Council, attempt
from distlion.checkpoint.folder import (
    PARTIAL,
    choose_name,
    discard,
    find_checkpoint,
    prune,
    publish,
    write_file,
    write_pointer,
)
from distlion.checkpoint.manifest import FORMAT, MANIFEST, Manifest, read_manifest
from distlion.checkpoint.tensor_file import FileRecord, write_tensors
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion.optim import VotingBase
from distlion.voting import Custody

CALL = "save_checkpoint()"
TREE = "tree"
"""The tensor of a file that holds its JSON, as bytes: a header has a limit."""

logger = logging.getLogger("distlion")
_under_way: set[Path] = set()


class PendingCheckpoint:
    """A checkpoint that is complete, or is being written in the background.

    Args:
        write: Writes it and returns its folder.
        in_background: Whether a thread does.
    """

    def __init__(self, write: Callable[[], Path], *, in_background: bool) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(
                target=self._run, args=(write,), name="distlion-checkpoint"
            )
            self._thread.start()
        else:
            self._path = write()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except BaseException as error:  # noqa: BLE001, raised by wait(), in the thread that asked
            logger.error("a checkpoint could not be written: %s", error)
            self._error = error

    def wait(self) -> Path:
        """Wait until it is complete, and return its folder.

        Raises:
            CheckpointError: It could not be written; on every rank. Earlier ones are as they were.
        """
        self.finish()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def finish(self) -> None:
        """Wait until it is over, however it ends."""
        if self._thread is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()


_pending: weakref.WeakKeyDictionary[VotingBase, PendingCheckpoint] = weakref.WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: VotingBase,
    scheduler: Any | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    async_: bool = False,
    only_trained: bool = False,
) -> PendingCheckpoint:
    """Save model, optimizer and every worker's momentum; every worker must call it, between steps.

    The new checkpoint is a folder ``step-...`` in ``path``, which ``latest`` names once all files
    of all workers are on the disk. At every instant, also of a crash, ``latest`` names a complete
    one.

    Args:
        path: The folder of the run's checkpoints, one for each optimizer; made where it is missing.
            Hosts may share it, or have one each, which then holds the momenta of their own workers.
        model: Whose ``state_dict`` is saved: what is equal on all workers once, buffers that differ
            for each.
        optimizer: ``DistributedLion`` or ``VirtualCluster``.
        scheduler: Whose ``state_dict`` is saved, if any.
        extra: What else this worker wants back: numbers, strings, tensors, numpy arrays, and lists,
            tuples and dicts of them; each worker its own, for example its place in the data.
        keep_last: Complete checkpoints to keep, this one included; None for all.
        async_: Copy everything to host memory, and write while training goes on. The next save or
            load of the optimizer waits for it, and so does the end of the interpreter. What went
            wrong is logged at once, and raised by ``wait()``.
        only_trained: Leave out what the optimizer does not train and all workers have alike, such
            as the base of an adapter; a load refuses a model that does not have the same.

    Returns:
        Its ``wait()`` returns the folder.

    Raises:
        CheckpointError: Some worker cannot write, or something cannot be saved, which the error
            names; on every rank. Training may go on.
        ReplicaMismatchError: Parameters are not equal on all workers; on every rank.
        ConfigMismatchError: Another worker is at another call; on every rank.
        PeerLostError, StepTimeoutError: A worker is gone, or has not written its part within
            ``init_timeout_s``.
        InvalidArgumentError, UnsupportedTypeError: An argument is out of range or of a wrong kind.

    Notes:
        What was promised of a checkpoint after ``load_checkpoint`` on as many workers: the same
        bits as without the interruption, as far as the caller's data and random numbers do so.

    Example:
        >>> distlion.save_checkpoint("runs/first", model, optimizer, scheduler, keep_last=3)
        >>> state = distlion.load_checkpoint("runs/first", model, optimizer, scheduler)
    """
    custody = custody_of(optimizer)
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise InvalidArgumentError(f"keep_last={keep_last!r}: expected a number above 0, or None")
    finish_pending(optimizer)
    with custody.meeting(CALL):
        contents, problem = attempt(lambda: collect(model, optimizer, scheduler, extra, custody))
        root, path_problem = attempt(lambda: Path(path))
        custody.agree(CALL, problem or path_problem)
        assert contents is not None and root is not None  # or all have raised
        council = Council(custody.open_channel(async_), process=custody.process, call=CALL)
        shared = _find_shared(council, contents)
        if async_:
            contents, problem = attempt(contents.snapshot)
            council.share(problem)
            assert contents is not None
        writer = _Writer(root, contents, shared, custody, council, keep_last, only_trained)
        pending = PendingCheckpoint(writer.write, in_background=async_)
    if async_:
        _pending[optimizer] = pending
    return pending


def finish_pending(optimizer: VotingBase) -> None:
    """Wait for a save in the background; who wants to know how it ended asks its ``wait()``."""
    pending = _pending.pop(optimizer, None)
    if pending is not None:
        pending.finish()


def custody_of(optimizer: object) -> Custody:
    """Return whose momenta an optimizer keeps.

    Raises:
        UnsupportedTypeError: It is none of ours that votes.
    """
    if not isinstance(optimizer, VotingBase):
        raise UnsupportedTypeError(
            f"optimizer is a {type(optimizer).__name__}; expected DistributedLion or "
            "VirtualCluster (for a single Lion, torch.save of its state_dict() holds everything)"
        )
    return optimizer.custody


def _find_shared(council: Council, contents: Contents) -> dict[str, int]:
    """Digest those of the model's tensors that are equal on all processes.

    Raises:
        ReplicaMismatchError: One that the optimizer keeps equal is not.
        CheckpointError: The models have different tensors.
    """
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in contents.model.items()]
    council.compare(repr(shapes), "names, shapes or dtypes of the model's tensors")
    found, problem = attempt(lambda: digest_entries(contents.model))
    council.share(problem)
    assert found is not None
    rows = council.gather(torch.tensor(found, dtype=torch.int64).numpy().tobytes())
    table = [memoryview(row).cast("q") for row in rows]
    differing = {
        name
        for column, name in enumerate(contents.model)
        if len({row[column] for row in table}) > 1
    }
    torn = [name for name in contents.model if name in differing & contents.replicated]
    if torn:
        raise council.refuse_replicas(torn, step=contents.step)
    digests = zip(contents.model, found, strict=True)
    return {name: digest for name, digest in digests if name not in differing}


class _Writer:
    """One process's part in writing a checkpoint.

    Args:
        root: The run's folder.
        contents: What this process has.
        shared: Digests of those of the model's tensors that are equal everywhere.
        custody: Whose momenta are here.
        council: All processes.
        keep_last: Complete checkpoints to keep; None for all.
        only_trained: Whether to leave out what is shared and not trained.
    """

    def __init__(
        self,
        root: Path,
        contents: Contents,
        shared: dict[str, int],
        custody: Custody,
        council: Council,
        keep_last: int | None,
        only_trained: bool,
    ) -> None:
        self._root = root
        self._contents = contents
        self._shared = shared
        self._left_out = shared.keys() - contents.replicated if only_trained else set()
        self._custody = custody
        self._council = council
        self._keep_last = keep_last

    def write(self) -> Path:
        """Write: 1 make a folder, 2 see who shares it, 3 write, 4 seal, 5 publish, 6 prune."""
        share, process = self._council.share, self._custody.process
        # 1 make a folder
        nonce = share(None, nonce=os.urandom(8).hex())[0]["nonce"]
        folder = self._root / f"{PARTIAL}step-{self._contents.step:012d}-{nonce}"
        _under_way.add(folder)
        try:
            share(attempt(lambda: self._enter(folder))[1])

            # 2 see who shares it: hosts may have a folder of this name each
            view, problem = attempt(lambda: self._see(folder))
            rows = share(problem, leader=None if view is None else view[0])
            leaders = [int(row["leader"]) for row in rows]
            assert view is not None

            # 3 write
            written, problem = attempt(lambda: self._write_files(folder, view))
            files = dict(written or {})
            facts = {name: [each.n_bytes, each.sha256] for name, each in files.items()}
            # The files of a process with many workers are known here, and may be too many to tell.
            rows = share(problem, files=facts if self._custody.n_processes > 1 else {})
            for row in rows:
                files |= {name: FileRecord(*fact) for name, fact in row["files"].items()}

            # 4 seal: from here on nothing needs room on the disk
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
            prune(self._root, keep_last=self._keep_last, own=own, under_way=_under_way)
            self._reached("pruned")
        return own

    def _reached(self, place: str) -> None:
        if faults.armed:
            rank, step = self._custody.process, self._contents.step
            faults.fire(rank=rank, step=step, point="checkpoint", subject=place)

    def _enter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._check_root()
        self._reached("made the folder")
        write_file(folder / self._mark(self._custody.process), b"")
        self._reached("marked the folder")

    def _check_root(self) -> None:
        """Refuse a folder that holds the checkpoints of another optimizer, which would be pruned.

        Raises:
            CheckpointError: It does.
        """
        try:
            latest = find_checkpoint(self._root)
            earlier = read_manifest(latest)
        except CheckpointError:  # the first one, or damaged: nothing that a save could lose
            return
        if earlier.layout != self._contents.layout_digest:
            raise CheckpointError(
                f"{latest} was saved from an optimizer with other parameters; give each optimizer "
                "a folder of its own"
            )

    def _mark(self, process: int) -> str:
        return f"present-{process:05d}"

    def _see(self, folder: Path) -> list[int]:
        """List the processes that write to this very folder, this one among them."""
        return [
            process
            for process in range(self._custody.n_processes)
            if (folder / self._mark(process)).exists()
        ]

    def _write_files(self, folder: Path, view: list[int]) -> dict[str, FileRecord]:
        contents, process = self._contents, self._custody.process
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
        """Take what this process writes of the shared tensors: about equal parts."""
        names = sorted(self._shared.keys() - self._left_out)
        shared = {name: self._contents.model[name] for name in names}
        load = dict.fromkeys(view, 0)
        mine = {}
        for name, tensor in sorted(shared.items(), key=lambda pair: -pair[1].nbytes):
            process = min(load, key=lambda number: load[number])
            load[process] += tensor.nbytes
            if process == self._custody.process:
                mine[name] = tensor
        return mine

    def _seal(
        self, folder: Path, view: list[int], leaders: list[int], files: dict[str, FileRecord]
    ) -> str:
        custody = self._custody
        manifest = Manifest(
            format=FORMAT,
            distlion=version("distlion"),
            torch=torch.__version__,
            step=self._contents.step,
            workers=custody.n_workers,
            node_size=custody.node_size,
            processes=custody.n_processes,
            seed=custody.seed,
            layout=self._contents.layout_digest,
            leaders=leaders,
            files=files,
        )
        write_file(folder / MANIFEST, manifest.encode())
        self._reached("wrote the manifest")
        for process in view:
            (folder / self._mark(process)).unlink()
        name = choose_name(self._root, self._contents.step)
        write_pointer(folder, name)
        self._reached("wrote the pointer")
        return name

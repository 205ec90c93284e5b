"""Saving: all processes agree before each writes its part, and can check the folder ahead."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.contents import (
    Contents,
    collect,
    digest_entries,
    find_owners,
    take_apart,
)
from distlion.checkpoint.folder import is_name, prune, read_manifest
from distlion.checkpoint.identity import agree_on_identity, check_owner, list_loaded
from distlion.checkpoint.tensor_file import check_tensor, warn_if_unreadable
from distlion.checkpoint.writer import Writer
from distlion.errors import (
    CheckpointError,
    DifferingModelsWarning,
    InvalidArgumentError,
    UnsupportedTypeError,
)
from distlion.local.local_steps import LocalSteps
from distlion.numpy_numbers import as_python
from distlion.optim.base import VotingBase
from distlion.peers.ownership import MomentumOwnership
from distlion.signals import LISTEN_S
from distlion.step.gradients import warn_user

CALL = "save_checkpoint()"
logger = logging.getLogger("distlion")


class PendingCheckpoint:
    """A checkpoint that is complete, or is being written in the background.

    Args:
        write: Function that writes it and returns its folder.
        in_background: Whether to run it on a thread.
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
            CheckpointError: It could not be written; on every rank. Earlier ones are unchanged.
            PeerLostError, StepTimeoutError: A worker is gone, or has not written its part.
        """
        self.finish()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def finish(self) -> None:
        """Wait until it is over, however it ends."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LISTEN_S)

    @property
    def is_done(self) -> bool:
        """True if ``wait`` returns or raises at once."""
        return self._thread is None or not self._thread.is_alive()


_warned: weakref.WeakSet[VotingBase] = weakref.WeakSet()
"""Optimizers of models that were found to differ between workers."""
_pending: weakref.WeakKeyDictionary[VotingBase, PendingCheckpoint] = weakref.WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: VotingBase | LocalSteps,
    scheduler: Any | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    async_: bool = False,
    only_trained: bool = False,
    overwrite: bool = False,
) -> PendingCheckpoint:
    """Save model, optimizer and every worker's momentum; every worker must call it, between steps.

    The new checkpoint is a folder ``step-...`` in ``path``; ``latest`` names it once all files of
    all workers are on the disk. At every instant, even in a crash, ``latest`` names a complete
    checkpoint.

    Args:
        path: The folder of the run's checkpoints, one for each optimizer; created if missing. Hosts
            may share it or have one each, which then holds the momenta of their own workers.
        model: The model to save: tensors equal on all workers once, buffers that differ for each
            worker. ``average_buffers`` makes them equal; a DifferingModelsWarning, once, says that
            some differ.
        optimizer: ``DistributedLion``, ``VirtualCluster`` or ``LocalSteps``. For ``LocalSteps`` the
            model's parameters are saved from the common point. Each worker's own parameters and
            inner state are saved beside its momenta.
        scheduler: The scheduler to save, if any.
        extra: Further state of this worker: numbers, strings, tensors, numpy arrays, and lists,
            tuples and dicts of them. Each worker has its own, for example its place in the data.
        keep_last: Complete checkpoints to keep, this one included; None for all.
        async_: Copy everything to host memory, and write while training goes on. The next save or
            load of the optimizer and the exit of the interpreter wait for it. An error is logged at
            once, and raised by ``wait()``. All workers give the same, also of ``only_trained``.
        only_trained: Leave out frozen parameters and buffers that are equal on all workers, such as
            the base of an adapter; a load refuses a model with other values.
        overwrite: Take over a folder that belongs to another optimizer; its checkpoints then count
            as earlier ones of this optimizer. False refuses it.

    Returns:
        The pending checkpoint, whose ``wait()`` returns the folder.

    Raises:
        CheckpointError: Some worker cannot write, a named value cannot be saved, the folder
            belongs to another optimizer, or workers differ in ``async_`` or ``only_trained``; on
            every rank. Training can go on.
        ReplicaMismatchError: Parameters are not equal on all workers; on every rank.
        ConfigMismatchError: Another worker is at a different call; on every rank.
        PeerLostError, StepTimeoutError: A worker is gone, or silent; or it has not written its part
            within ``Timeouts.busy_s``.
        InvalidArgumentError, UnsupportedTypeError: An argument is out of range or of a wrong kind.

    Notes:
        After ``load_checkpoint`` on as many workers, training is bitwise identical to a run without
        the interruption, provided that the caller's data and random numbers are.

    Example:
        >>> distlion.save_checkpoint("runs/first", model, optimizer, scheduler, keep_last=3)
        >>> state = distlion.load_checkpoint("runs/first", model, optimizer, scheduler)
    """
    votes, local = take_apart(optimizer)
    ownership = ownership_of(votes)
    keep_last = as_python(keep_last)
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise InvalidArgumentError(f"keep_last={keep_last!r}: expected a number above 0, or None")
    finish_pending(votes)
    with ownership.meeting(CALL):
        contents, problem = attempt(
            lambda: collect(model, votes, scheduler, extra, ownership, local)
        )
        root, path_problem = attempt(lambda: _find_root(path))
        # Where these differ, processes would wait on other connections, or leave tensors out.
        said = f"async_={bool(async_)}, only_trained={bool(only_trained)}"
        ownership.agree(CALL, problem or path_problem, said)
        assert contents is not None and root is not None  # or all have raised
        barrier = CheckpointBarrier(
            ownership.open_channel(async_), process=ownership.process, call=CALL
        )
        if local is not None:
            barrier.compare(local.progress.describe(), "local steps")
        shared = _find_shared(barrier, contents)
        own = {name: contents.model[name] for name in contents.model if name not in shared}
        differing = own.keys(), find_owners(model, model.parameters(), own).keys()
        left_out = shared.keys() & contents.untrained if only_trained else set[str]()
        if async_:
            contents = barrier.run(partial(contents.snapshot, left_out))
        writer = Writer(
            root,
            contents,
            shared,
            ownership,
            barrier,
            identity=agree_on_identity(barrier, votes),
            loaded=list_loaded(votes),
            keep_last=keep_last,
            left_out=left_out,
            overwrite=overwrite,
        )
        pending = PendingCheckpoint(writer.write, in_background=async_)
        if async_:  # within: Ctrl-C at the end of the meeting must not lose it
            _pending[votes] = pending
    warn_if_unreadable()
    _warn_of_differing(*differing, votes)
    return pending


def _find_root(path: str | os.PathLike[str]) -> Path:
    """Return a folder's absolute path: the script may change its folder during the save.

    Raises:
        CheckpointError: It is an address such as s3://..., or has the name of a single checkpoint,
            and would be loaded as one.
        TypeError, ValueError: It is no path, or no file can have that name.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(
            f"{path} is an address. Expected a folder of a file system. Save there, and copy "
            "finished checkpoints to the address"
        )
    root = Path(path).absolute()
    if is_name(root.name):
        raise CheckpointError(
            f"{root} has the name of a single checkpoint. Expected the folder of the run's "
            f"checkpoints. Save into {root.parent}"
        )
    with contextlib.suppress(OSError):
        os.lstat(root)
    return root


def prune_checkpoints(own: Path, optimizer: VotingBase | LocalSteps, *, keep_last: int) -> None:
    """Remove all but the newest checkpoints of a folder, later than ``save_checkpoint`` would.

    Args:
        own: The newest, which stays.
        optimizer: Their optimizer; one of the processes that share the folder removes them.
        keep_last: Number of checkpoints to keep.
    """
    if ownership_of(take_apart(optimizer)[0]).process in read_manifest(own).leaders:
        prune(own.parent, keep_last=keep_last, own=own)


def finish_pending(optimizer: VotingBase) -> None:
    """Wait for a save in the background, and ignore its outcome, which ``wait()`` reports."""
    pending = _pending.get(optimizer)
    if pending is not None:
        pending.finish()
        _pending.pop(optimizer, None)  # last: Ctrl-C during the wait must not lose it


def ownership_of(optimizer: object) -> MomentumOwnership:
    """Return the ownership of the momenta that an optimizer keeps.

    Raises:
        UnsupportedTypeError: It is not a voting optimizer of distlion.
    """
    if not isinstance(optimizer, VotingBase):
        raise UnsupportedTypeError(
            f"optimizer is a {type(optimizer).__name__}; expected DistributedLion, "
            "VirtualCluster or LocalSteps (for a single Lion, torch.save of its state_dict() holds "
            "everything)"
        )
    return optimizer.momentum_ownership


def _find_shared(barrier: CheckpointBarrier, contents: Contents) -> dict[str, int]:
    """Digest the model's tensors that are equal on all processes.

    Raises:
        ReplicaMismatchError: A tensor that the optimizer keeps equal is not.
        CheckpointError: The models have different tensors.
    """
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in contents.model.items()]
    # Hooks may tell trained tensors from others on some processes only.
    said = repr((shapes, sorted(contents.replicated), sorted(contents.untrained)))
    barrier.compare(said, "names, shapes or dtypes of the model's tensors")
    found, problem = attempt(lambda: digest_entries(contents.model))
    table = [row["digests"] for row in barrier.share(problem, digests=found)]
    assert found is not None
    differing = {
        name
        for column, name in enumerate(contents.model)
        if len({row[column] for row in table}) > 1
    }
    torn = [name for name in contents.model if name in differing & contents.replicated]
    if torn:
        raise barrier.refuse_replicas(torn, step=contents.step)
    digests = zip(contents.model, found, strict=True)
    return {name: digest for name, digest in digests if name not in differing}


def _warn_of_differing(names: Set[str], parameters: Set[str], optimizer: VotingBase) -> None:
    """Warn once of tensors of the model that each worker has of its own."""
    if not names or optimizer in _warned:
        return
    _warned.add(optimizer)
    found = {"frozen parameter": names & parameters, "buffer": names - parameters}
    kinds = [
        f"{len(each)} {kind}{'s' if len(each) > 1 else ''}, such as {min(each)!r},"
        for kind, each in found.items()
        if each
    ]
    advice = "Load or seed frozen parameters alike on all workers. " if names & parameters else ""
    if names - parameters:
        advice += "Call distlion.average_buffers(model) on every rank before saving and evaluating."
    warn_user(
        f"{CALL}: {' and '.join(kinds)} differ between workers. Layers such as BatchNorm evaluate "
        "with them, so that each worker's model gives other results. The checkpoint holds every "
        f"worker's own. {advice.strip()}",
        DifferingModelsWarning,
    )


def check_checkpoint_folder(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: VotingBase | LocalSteps,
    *,
    only_trained: bool = False,
) -> None:
    """Raise now what the first ``save_checkpoint`` would raise about folder, model and optimizer.

    It writes nothing. Every worker must call it, with what it will save: before the first step, and
    after ``load_checkpoint`` if the run resumes.

    Args:
        path: The folder of the run's checkpoints; it may be missing.
        model: The model to save.
        optimizer: The optimizer to save.
        only_trained: As for ``save_checkpoint``.

    Raises:
        CheckpointError: On some worker the folder belongs to another optimizer or an earlier run,
            or cannot be written, or the model is no module, or holds what cannot be saved; on every
            rank.
        ConfigMismatchError: Another worker is at a different call; on every rank.
        UnsupportedTypeError: The optimizer is of a wrong kind.

    Example:
        >>> distlion.check_checkpoint_folder("runs/first", model, optimizer)
    """
    votes, local = take_apart(optimizer)
    ownership = ownership_of(votes)
    finish_pending(votes)
    call = "check_checkpoint_folder()"
    with ownership.meeting(call):
        ownership.agree(call, None)
        barrier = CheckpointBarrier(
            ownership.open_channel(False), process=ownership.process, call=call
        )
        identity = agree_on_identity(barrier, votes)

        def check() -> None:
            contents = collect(model, votes, None, None, ownership, local)
            identities = frozenset({identity, *list_loaded(votes)})
            _check_folder(_find_root(path), identities, contents.layout_digest)
            for name in contents.model.keys() - (contents.untrained if only_trained else set()):
                check_tensor(name, contents.model[name])

        barrier.run(check)


def _check_folder(root: Path, identities: frozenset[str], layout: str) -> None:
    present = next(each for each in (root, *root.absolute().parents) if os.path.lexists(each))
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{root} cannot be written: {present} is no folder, or is not writable. Expected a "
            "folder for checkpoints. Choose another one, or change its permissions"
        )
    check_owner(root, identities, layout)

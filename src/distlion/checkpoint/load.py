"""Loading: all processes check and parse everything, agree, and only then change anything."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.contents import list_changing, list_params, take_apart
from distlion.checkpoint.folder import Manifest, find_checkpoint, read_manifest
from distlion.checkpoint.identity import list_loaded, note_loaded, read_newest
from distlion.checkpoint.reader import Reader
from distlion.checkpoint.remap import WorldChange, check_world_change
from distlion.checkpoint.save import finish_pending, ownership_of
from distlion.checkpoint.undo import all_or_nothing
from distlion.errors import CheckpointError, DistlionError
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase, read_state
from distlion.peers.ownership import Gather, MomentumOwnership
from distlion.wire.ask import ask
from distlion.wire.gloo import Gloo
from distlion.wire.groups import carries_host_memory, own_group
from distlion.wire.roll_call import BUSY_TIMEOUT_S

CALL = "load_checkpoint()"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load, apart from model, optimizer and scheduler.

    Attributes:
        path: The checkpoint's folder.
        step: Steps committed; with ``LocalSteps``, votes.
        local_step: Steps that each worker has taken, from which its data goes on: ``step``, or the
            calls of ``LocalSteps.step``.
        workers: Number of workers whose momenta it holds.
        extra: The ``extra`` that this worker gave to ``save_checkpoint``, or, if the number of
            workers changed, the one from the worker in this one's place.
    """

    path: Path
    step: int
    local_step: int
    workers: int
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: VotingBase | LocalSteps,
    scheduler: Any | None = None,
    *,
    on_world_change: WorldChange = "raise",
) -> LoadedCheckpoint:
    """Load what ``save_checkpoint`` saved; every worker must call it.

    Every file's size and SHA-256 are checked before it is parsed, and no code in it is run. Nothing
    is changed before all workers have read everything.

    Args:
        path: The folder of a run's checkpoints, for the latest, or the folder of one checkpoint.
        model: Overwritten.
        optimizer: Overwritten; it must have the saved optimizer's parameters and seed.
        scheduler: Overwritten, if given.
        on_world_change: Momenta to begin with if the number of workers has changed. "map" gives
            each worker the mean of its neighborhood, "mean" gives all workers the same mean,
            "reset" gives zeros, "raise" refuses.

    Returns:
        The steps, and this worker's ``extra``.

    Raises:
        CheckpointError: On some worker a file is missing, truncated or damaged, or its contents do
            not fit; names it; on every rank, with nothing changed.
        ConfigMismatchError: Another worker is at a different call; on every rank.
        InvalidArgumentError, UnsupportedTypeError: An argument is out of range or of a wrong kind.

    Equation:
        m'_j = (1 / W) sum_i m_i for "mean"; for "map" the mean of the m_i over
        [j W / W', (j + 1) W / W'), voter i being [i, i + 1). Both keep the mean over voters, to
        rounding. With ``nodes``, voters are nodes.

    Example:
        >>> state = distlion.load_checkpoint("runs/first", model, optimizer, scheduler)
        >>> first_batch = state.local_step
    """
    with ExitStack() as stack:
        loading = Loading(model, optimizer, scheduler, stack, on_world_change=on_world_change)
        loading.check(lambda: Path(path))
        loading.parse()
        undo = all_or_nothing(model, *list_changing(*take_apart(optimizer)), scheduler)
        _, problem = attempt(lambda: stack.enter_context(undo))  # there may be no memory for it
        return loading.apply(problem)


class Loading:
    """The load of one optimizer, in three parts; all its workers do each of them, or none.

    Args:
        model, optimizer, scheduler, on_world_change: As for ``load_checkpoint``.
        stack: Stack that closes files.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: As for ``load_checkpoint``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: VotingBase | LocalSteps,
        scheduler: Any | None,
        stack: ExitStack,
        *,
        on_world_change: WorldChange,
    ) -> None:
        votes, self._local = take_apart(optimizer)
        self._ownership = ownership_of(votes)
        check_world_change(on_world_change)
        finish_pending(votes)
        self._model, self._optimizer, self._scheduler = model, votes, scheduler
        self._stack, self._on_world_change = stack, on_world_change

    def check(self, find: Callable[[], Path]) -> None:
        """Check the sums of all files that the processes need; nothing is changed.

        Args:
            find: Function that returns the folder, or raises if this process cannot load.

        Raises:
            CheckpointError: A process cannot load, or a file is missing or damaged; on all.
        """
        ownership = self._ownership
        with ownership.meeting(CALL):
            ownership.agree(CALL, None)
            channel = ownership.open_channel(False)
            self._barrier = CheckpointBarrier(channel, process=ownership.process, call=CALL)
            self._reader = self._barrier.run(
                lambda: Reader(find(), ownership, self._on_world_change, self._stack)
            )
            check_equal(self._barrier, self._reader)

    def parse(self, problem: CheckpointError | None = None) -> None:
        """Parse all of it, and check that it fits; nothing is changed.

        Args:
            problem: Error of this process since ``check``; None for none.

        Raises:
            CheckpointError: It does not fit, or some process has a problem; on all of them.
        """
        parsed = None
        with self._ownership.meeting(CALL):
            if problem is None:
                parsed, problem = attempt(
                    lambda: self._reader.parse(
                        self._model, self._optimizer, self._scheduler, self._local
                    )
                )
            self._barrier.share(problem)
            if parsed is not None and parsed.local is not None:
                self._barrier.compare(
                    parsed.local.progress.describe(), "the local steps that were saved"
                )
        assert parsed is not None  # or all have raised
        self._parsed = parsed

    def apply(self, problem: CheckpointError | None = None) -> LoadedCheckpoint:
        """Overwrite everything; the caller restores it if this fails.

        Args:
            problem: Error of this process since ``parse``; None for none.

        Raises:
            CheckpointError: Some process cannot; on all of them.
        """
        with self._ownership.meeting(CALL):
            if problem is None:
                _, problem = attempt(self._overwrite)
            self._ownership.agree(CALL, problem)
        self._before = read_state(self._optimizer), list_loaded(self._optimizer)
        # Last, as it compares with all workers once more and can fail on all of them.
        self._optimizer.load_state_dict(self._parsed.optimizer)
        reader = self._reader
        newest = _find_newest(reader) or reader.manifest
        loaded = reader.manifest.identities | newest.identities
        note_loaded(self._optimizer, list_loaded(self._optimizer) | loaded)
        manifest = reader.manifest
        step = manifest.step if self._local is None else self._local.local_step
        return LoadedCheckpoint(
            reader.folder, manifest.step, step, manifest.workers, self._parsed.extra
        )

    def take_back(self, error: DistlionError) -> None:
        """Restore the optimizer's state from before ``apply``, unless others may be gone."""
        if error.is_recoverable or self._ownership.n_processes == 1:
            state, loaded = self._before
            self._optimizer.load_state_dict(state)
            note_loaded(self._optimizer, loaded)

    def _overwrite(self) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._parsed.scheduler)
        self._model.load_state_dict(self._parsed.model)
        params = list_params(self._optimizer)
        with torch.no_grad():
            for index, value in self._parsed.outside.items():
                params[index].copy_(value)
        if self._local is not None and self._parsed.local is not None:
            self._parsed.local.apply(self._local)


def _find_newest(reader: Reader) -> Manifest | None:
    try:
        return read_newest(reader.folder.parent)
    except (OSError, CheckpointError):  # that nobody may list, or whose others are damaged
        return None


def check_equal(barrier: CheckpointBarrier, reader: Reader) -> None:
    """Raise where processes have different checkpoints before them."""
    steps = barrier.share(None, step=reader.manifest.step, files=reader.manifest.digest)
    if len({row["files"] for row in steps}) > 1:
        listed = ", ".join(f"{number}: {row['step']}" for number, row in enumerate(steps))
        raise barrier.refuse(
            range(len(steps)),
            f"processes have different checkpoints before them (steps {listed}); name one that all "
            "of them have",
        )


Check = Callable[[Sequence[Path]], None]
"""Check the folders of all optimizers, with all processes."""

_Rest = TypeVar("_Rest")
_calls = itertools.count()


def load_together(
    model: nn.Module,
    optimizers: Sequence[VotingBase | LocalSteps],
    load_rest: Callable[[Check], _Rest],
    *kept: Any,
    on_world_change: WorldChange,
) -> _Rest:
    """Load a model, a framework's other state and its optimizers on all processes, or nothing.

    1 check all files of all optimizers, 2 let the framework load its own, 3 parse the optimizers'
    files and check that they fit, 4 apply them.

    Args:
        model: The model of all optimizers.
        optimizers: Optimizers, which the framework must not load.
        load_rest: Function that loads the framework's files. Before it changes anything, it calls
            its argument with the folder of each optimizer's checkpoint.
        kept: Other objects that it changes; restored if some process fails.
        on_world_change: As for ``load_checkpoint``.

    Returns:
        The result of ``load_rest``.

    Raises:
        CheckpointError: Some process cannot load; on every rank, with nothing changed.
    """
    changing = [list_changing(*take_apart(optimizer)) for optimizer in optimizers]
    with ExitStack() as stack:
        loadings = [
            Loading(model, optimizer, None, stack, on_world_change=on_world_change)
            for optimizer in optimizers
        ]
        gate, undo = _Gate(loadings), all_or_nothing(model, *chain(*changing), *kept)
        if not loadings:
            with undo:
                return load_rest(gate.check)

        def load_framework() -> _Rest:
            stack.enter_context(undo)
            return load_rest(gate.check)

        rest, problem = attempt(load_framework)
        gate.close(problem)
        for loading in loadings:
            loading.parse(problem)
        _apply(loadings)
    return rest  # type: ignore[return-value]  # or all have raised


class _Gate:
    """The point in a framework's load where all processes meet before anything is changed."""

    def __init__(self, loadings: Sequence[Loading]) -> None:
        self._loadings = loadings
        self._is_passed = False
        self._error: DistlionError | None = None

    def check(self, folders: Sequence[Path]) -> None:
        """Check the folders of all optimizers, with all processes."""
        try:
            for loading, folder in zip(self._loadings, folders, strict=True):
                loading.check(lambda folder=folder: folder)  # type: ignore[misc]
        except DistlionError as error:
            self._error = error
            raise
        self._is_passed = True

    def close(self, problem: CheckpointError | None) -> None:
        """Raise the same error on all processes, also if this one has not met them.

        Args:
            problem: Error of the framework's load; None for none.
        """
        if self._error is not None:
            raise self._error
        if not self._is_passed:

            def fail() -> Path:
                raise problem or CheckpointError(
                    "it does not say where the momenta of all workers are"
                )

            self._loadings[0].check(fail)


def _apply(loadings: Sequence[Loading]) -> None:
    applied: list[Loading] = []
    try:
        for loading in loadings:
            loading.apply()
            applied.append(loading)
    except DistlionError as error:
        for loading in applied:
            loading.take_back(error)
        raise


def check_checkpoints(find: Callable[[], Sequence[Path]], *, on_world_change: WorldChange) -> None:
    """Check all files of checkpoints before there are optimizers; every process must call it.

    For frameworks that load a model before they make its optimizer. ``load_checkpoint`` does the
    checks that need an optimizer, such as of parameters and seed.

    Args:
        find: Function that returns the folders, or raises if this process cannot load.
        on_world_change: As for ``load_checkpoint``.

    Raises:
        CheckpointError: Some process cannot load, or a file that it needs is missing, damaged, or
            for another number of workers; on every rank.
    """
    workers = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    rank, n_ranks = (0, 1) if workers is None else (workers.rank(), workers.size())
    channel = (lambda record: [record]) if workers is None else _open_channel(workers)
    barrier = CheckpointBarrier(channel, process=rank, call=CALL)

    def read() -> list[Reader]:
        return [_read(folder, rank, n_ranks, on_world_change, stack) for folder in find()]

    with ExitStack() as stack:
        for reader in barrier.run(read):
            check_equal(barrier, reader)


def _read(
    folder: Path, rank: int, n_ranks: int, on_world_change: WorldChange, stack: ExitStack
) -> Reader:
    manifest = read_manifest(find_checkpoint(folder))
    alone = MomentumOwnership.of_one_process(1, is_stacked=False, seed=manifest.seed)
    size = manifest.node_size if n_ranks % manifest.node_size == 0 else 1
    place = replace(
        alone, workers=(rank,), n_workers=n_ranks, node_size=size, process=rank, n_processes=n_ranks
    )
    return Reader(folder, place, on_world_change, stack)


def _open_channel(workers: dist.ProcessGroup) -> Gather:
    if not carries_host_memory(workers):
        name = f"checks of checkpoints/{next(_calls)}"
        workers = own_group(workers, name=name, timeout_s=BUSY_TIMEOUT_S)
    link = Gloo(workers, timeout_s=BUSY_TIMEOUT_S)
    return lambda record: ask(link, record, step=None)

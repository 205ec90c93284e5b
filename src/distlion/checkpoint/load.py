"""Loading: all processes check and parse everything, agree, and only then change anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.identity import list_loaded, note_loaded, read_newest
from distlion.checkpoint.local import list_changing, list_params, take_apart
from distlion.checkpoint.reader import Reader
from distlion.checkpoint.remap import WorldChange, check_world_change
from distlion.checkpoint.save import finish_pending, ownership_of
from distlion.checkpoint.undo import all_or_nothing
from distlion.errors import CheckpointError
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase, read_state

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
        with all_or_nothing(model, *list_changing(*take_apart(optimizer)), scheduler):
            return loading.apply()


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

    @property
    def is_alone(self) -> bool:
        """True if this process keeps the momenta of all workers."""
        return self._ownership.n_processes == 1

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
            reader, problem = attempt(
                lambda: Reader(find(), ownership, self._on_world_change, self._stack)
            )
            self._barrier.share(problem)
            assert reader is not None  # or all have raised
            check_equal(self._barrier, reader)
        self._reader = reader

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

    def apply(self) -> LoadedCheckpoint:
        """Overwrite everything; the caller restores it if this fails.

        Raises:
            CheckpointError: Some process cannot; on all of them.
        """
        with self._ownership.meeting(CALL):
            _, problem = attempt(self._overwrite)
            self._ownership.agree(CALL, problem)
        self._before = read_state(self._optimizer), list_loaded(self._optimizer)
        # Last, as it compares with all workers once more and can fail on all of them.
        self._optimizer.load_state_dict(self._parsed.optimizer)
        reader = self._reader
        newest = read_newest(reader.folder.parent) or reader.manifest
        loaded = frozenset({reader.manifest.identity, newest.identity})
        note_loaded(self._optimizer, list_loaded(self._optimizer) | loaded)
        manifest = reader.manifest
        step = manifest.step if self._local is None else self._local.local_step
        return LoadedCheckpoint(
            reader.folder, manifest.step, step, manifest.workers, self._parsed.extra
        )

    def take_back(self) -> None:
        """Restore the optimizer's state from before ``apply``, on all processes."""
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

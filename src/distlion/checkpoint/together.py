"""Checkpoints that a framework loads beside its own files: checked first, loaded with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from distlion.checkpoint.barrier import CheckpointBarrier, attempt
from distlion.checkpoint.folder import find_checkpoint
from distlion.checkpoint.load import CALL, Loading, check_equal
from distlion.checkpoint.local import list_changing, take_apart
from distlion.checkpoint.manifest import read_manifest
from distlion.checkpoint.reader import Reader
from distlion.checkpoint.remap import WorldChange
from distlion.checkpoint.undo import all_or_nothing
from distlion.errors import CheckpointError, DistlionError
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase
from distlion.peers.ownership import Gather, MomentumOwnership
from distlion.wire.ask import ask
from distlion.wire.gloo import Gloo
from distlion.wire.groups import carries_host_memory, own_group
from distlion.wire.roll_call import BUSY_TIMEOUT_S

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
    with ExitStack() as stack, all_or_nothing(model, *chain(*changing), *kept):
        loadings = [
            Loading(model, optimizer, None, stack, on_world_change=on_world_change)
            for optimizer in optimizers
        ]
        gate = _Gate(loadings)
        if not loadings:
            return load_rest(gate.check)
        rest, problem = attempt(lambda: load_rest(gate.check))
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
            if error.is_recoverable or loading.is_alone:  # else others may not be there
                loading.take_back()
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
    channel = _gather_alone if workers is None else _open_channel(workers)
    barrier = CheckpointBarrier(channel, process=rank, call=CALL)

    def read() -> list[Reader]:
        return [_read(folder, rank, n_ranks, on_world_change, stack) for folder in find()]

    with ExitStack() as stack:
        readers, problem = attempt(read)
        barrier.share(problem)
        assert readers is not None  # or all have raised
        for reader in readers:
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


def _gather_alone(record: bytes) -> list[bytes]:
    return [record]

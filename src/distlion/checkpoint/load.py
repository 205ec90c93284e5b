"""Loading: all processes check and parse everything, agree, and only then change anything."""

from __future__ import annotations

import os
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlion.checkpoint.contents import list_params
from distlion.checkpoint.council import Council, attempt
from distlion.checkpoint.identity import adopt
from distlion.checkpoint.reader import Parsed, Reader
from distlion.checkpoint.remap import WorldChange, check_world_change
from distlion.checkpoint.save import custody_of, finish_pending
from distlion.errors import DistlionError
from distlion.optim import VotingBase
from distlion.voting import Custody

CALL = "load_checkpoint()"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What came back beside model, optimizer and scheduler.

    Attributes:
        path: The checkpoint's folder.
        step: Steps committed.
        workers: Whose momenta it holds.
        extra: What this worker gave to ``save_checkpoint``; where their number has changed, what
            the worker gave that stood at this one's place.
    """

    path: Path
    step: int
    workers: int
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: VotingBase,
    scheduler: Any | None = None,
    *,
    on_world_change: WorldChange = "error",
) -> LoadedCheckpoint:
    """Load what ``save_checkpoint`` saved; every worker must call it.

    Every file is compared with its size and SHA-256 before it is parsed, and no code in it is run.
    Nothing is changed before all workers have everything.

    Args:
        path: The folder of a run's checkpoints, for the latest, or that of one checkpoint.
        model: Overwritten.
        optimizer: Overwritten; with the parameters and the seed of the one that was saved.
        scheduler: Overwritten, if given.
        on_world_change: What workers begin with where their number is another than the saved one:
            "map", each the mean momentum of its neighbourhood; "mean", all the same mean; "reset",
            zeros; "error" refuses.

    Returns:
        The step, and this worker's ``extra``.

    Raises:
        CheckpointError: On some worker a file is missing, cut off or damaged, or what it holds does
            not fit; names it; on every rank, with nothing changed.
        ConfigMismatchError: Another worker is at another call; on every rank.
        InvalidArgumentError, UnsupportedTypeError: An argument is out of range or of a wrong kind.

    Equation:
        m'_j = (1 / W) sum_i m_i for "mean"; for "map" the mean of the m_i over
        [j W / W', (j + 1) W / W'), voter i being [i, i + 1). Both keep the mean over voters, to
        rounding. With ``nodes``, voters are nodes.

    Example:
        >>> state = distlion.load_checkpoint("runs/first", model, optimizer, scheduler)
        >>> first_batch = state.step
    """
    custody = custody_of(optimizer)
    check_world_change(on_world_change)
    finish_pending(optimizer)
    with ExitStack() as stack:
        with custody.meeting(CALL):
            custody.agree(CALL, None)
            council = Council(custody.open_channel(False), process=custody.process, call=CALL)
            reader, problem = attempt(lambda: Reader(Path(path), custody, on_world_change, stack))
            council.share(problem)
            assert reader is not None  # or all have raised
            _check_equal(council, reader)
            parsed, problem = attempt(lambda: reader.parse(model, optimizer, scheduler))
            council.share(problem)
            assert parsed is not None
        _apply(parsed, model, optimizer, scheduler, custody)
    adopt(optimizer, reader.manifest.identity)
    return LoadedCheckpoint(
        reader.folder, reader.manifest.step, reader.manifest.workers, parsed.extra
    )


def _check_equal(council: Council, reader: Reader) -> None:
    steps = council.share(None, step=reader.manifest.step, files=reader.manifest.digest)
    if len({row["files"] for row in steps}) > 1:
        listed = ", ".join(f"{number}: {row['step']}" for number, row in enumerate(steps))
        raise council.refuse(
            range(len(steps)),
            f"processes have different checkpoints before them (steps {listed}); name one that all "
            "of them have",
        )


def _apply(
    parsed: Parsed,
    model: nn.Module,
    optimizer: VotingBase,
    scheduler: Any | None,
    custody: Custody,
) -> None:
    """Overwrite everything on all processes, or restore it where one of them cannot."""
    undo = _Undo(model, optimizer, scheduler)
    try:
        with custody.meeting(CALL):
            _, problem = attempt(lambda: _overwrite(parsed, model, optimizer, scheduler))
            custody.agree(CALL, problem)
        # Last, as it compares with all workers once more, and refuses on all of them.
        optimizer.load_state_dict(parsed.optimizer)
    except DistlionError:
        undo.restore()
        raise


def _overwrite(
    parsed: Parsed, model: nn.Module, optimizer: VotingBase, scheduler: Any | None
) -> None:
    if scheduler is not None:
        scheduler.load_state_dict(parsed.scheduler)
    model.load_state_dict(parsed.model)
    params = list_params(optimizer)
    with torch.no_grad():
        for index, value in parsed.outside.items():
            params[index].copy_(value)


class _Undo:
    """What was there before."""

    def __init__(self, model: nn.Module, optimizer: VotingBase, scheduler: Any | None) -> None:
        tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
        self._tensors = [(each, each.clone()) for each in [*tensors, *list_params(optimizer)]]
        self._scheduler = scheduler
        self._schedule = None if scheduler is None else deepcopy(scheduler.state_dict())
        self._lrs = [group["lr"] for group in optimizer.param_groups]
        self._groups = optimizer.param_groups

    def restore(self) -> None:
        """Put it back."""
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        if self._scheduler is not None:
            self._scheduler.__dict__.update(self._schedule)
        for index, group in enumerate(self._groups):
            group["lr"] = self._lrs[index]

"""Loading: all processes check and parse everything, agree, and only then change anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlion.checkpoint.contents import OUTSIDE, describe_layout, digest_entries, list_params
from distlion.checkpoint.council import Council, attempt
from distlion.checkpoint.folder import find_checkpoint
from distlion.checkpoint.manifest import Manifest, read_manifest
from distlion.checkpoint.remap import (
    Share,
    WorldChange,
    check_world_change,
    mix_momenta,
    share_out,
)
from distlion.checkpoint.save import custody_of, finish_pending
from distlion.checkpoint.schedule import check_schedule
from distlion.checkpoint.tensor_file import TensorFile, check_file
from distlion.checkpoint.tree import decode_tree
from distlion.checkpoint.writer import TREE
from distlion.errors import CheckpointError, DistlionError
from distlion.optim import KEPT, VotingBase
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


@dataclass(frozen=True)
class _Parsed:
    """All that is to be loaded, once everybody has it."""

    model: dict[str, Any]
    outside: dict[int, Tensor]
    optimizer: dict[str, Any]
    scheduler: Any
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
            reader, problem = attempt(lambda: _Reader(Path(path), custody, on_world_change, stack))
            council.share(problem)
            assert reader is not None  # or all have raised
            _check_equal(council, reader)
            parsed, problem = attempt(lambda: reader.parse(model, optimizer, scheduler))
            council.share(problem)
            assert parsed is not None
        _apply(parsed, model, optimizer, scheduler, custody)
    return LoadedCheckpoint(
        reader.folder, reader.manifest.step, reader.manifest.workers, parsed.extra
    )


def _check_equal(council: Council, reader: _Reader) -> None:
    steps = council.share(None, step=reader.manifest.step, files=reader.manifest.digest)
    if len({row["files"] for row in steps}) > 1:
        listed = ", ".join(f"{number}: {row['step']}" for number, row in enumerate(steps))
        raise council.refuse(
            range(len(steps)),
            f"processes have different checkpoints before them (steps {listed}); name one that all "
            "of them have",
        )


def _apply(
    parsed: _Parsed,
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
    parsed: _Parsed, model: nn.Module, optimizer: VotingBase, scheduler: Any | None
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


class _Reader:
    """One process's view of a checkpoint.

    Args:
        path: The run's folder, or the checkpoint's.
        custody: Whose momenta this process keeps.
        on_world_change: What other workers begin with.
        stack: Closes files.

    Raises:
        CheckpointError: Something that this process needs is missing or damaged.
    """

    def __init__(
        self, path: Path, custody: Custody, on_world_change: WorldChange, stack: ExitStack
    ) -> None:
        self.folder = find_checkpoint(path)
        self.manifest: Manifest = read_manifest(self.folder)
        self._custody = custody
        self._stack = stack
        if self.manifest.seed != custody.seed:
            raise CheckpointError(
                f"{self.folder} was saved with seed={self.manifest.seed}, and this optimizer has "
                f"seed={custody.seed}: ties would be broken otherwise; give the saved seed"
            )
        voters = sorted({worker // custody.node_size for worker in custody.workers})
        self._shares: dict[int, list[Share]] = {
            voter: share_out(
                voter,
                saved=self.manifest.n_voters,
                present=custody.n_voters,
                rule=on_world_change,
            )
            for voter in voters
        }
        # The process that stood where this one stands.
        twin = custody.process * self.manifest.processes // custody.n_processes
        self._own = self._open(f"process-{twin:05d}.safetensors")
        self._model = [self._open(name) for name in self._find_model_files()]
        self._momenta = {
            voter: [
                self._open(f"worker-{worker:05d}.safetensors") for worker in self._ranks_of(voter)
            ]
            for voter in sorted({number for each in self._shares.values() for number, _ in each})
        }

    def _ranks_of(self, voter: int) -> range:
        size = self.manifest.node_size
        return range(voter * size, (voter + 1) * size)

    def _find_model_files(self) -> list[str]:
        """Return the files of those who wrote to one folder, which hold the whole model."""
        names: list[str] = []
        for leader in sorted(set(self.manifest.leaders)):
            names = [
                f"model-{process:05d}.safetensors"
                for process, led_by in enumerate(self.manifest.leaders)
                if led_by == leader
            ]
            if all((self.folder / name).exists() for name in names):
                break
        return names

    def _open(self, name: str) -> TensorFile:
        path = self.folder / name
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.folder} lists no {name}")
        check_file(path, self.manifest.files[name])
        return TensorFile(path, self._stack)

    def parse(self, model: nn.Module, optimizer: VotingBase, scheduler: Any | None) -> _Parsed:
        """Parse everything, and check that it fits.

        Raises:
            CheckpointError: It does not.
        """
        try:
            tree: dict[str, Any] = json.loads(bytes(self._own.read(TREE).numpy()))
            self._check_layout(tree["layout"], describe_layout(model, optimizer))
            saved = self._read_model(tree) | self._take_left_out(tree, model)
            saved |= {name: saved[other] for name, other in tree["aliases"].items()}
            outside = {
                index: saved.pop(f"{OUTSIDE}{index}")
                for index in range(len(tree["layout"]))
                if f"{OUTSIDE}{index}" in saved
            }
            _check_model(saved, model)
            state = self._read_optimizer(tree, optimizer)
            schedule = decode_tree(tree["scheduler"], self._copy)
            extra = decode_tree(tree["extra"], self._copy)
        except CheckpointError:
            raise
        # What a forged tree makes of indices, sizes and shapes fails in any way.
        except Exception as error:
            raise CheckpointError(f"{self._own.path} is malformed ({error!r})") from error
        if scheduler is not None:
            check_schedule(self.folder, schedule, scheduler)
        return _Parsed(saved, outside, state, schedule, extra)

    def _copy(self, name: str) -> Tensor:
        """Read what the caller keeps: the file may be removed, and must not be mapped then."""
        return self._own.read(name).clone()

    def _check_layout(self, saved: Sequence[Any], present: Sequence[Any]) -> None:
        if len(saved) != len(present):
            raise CheckpointError(
                f"{self.folder} holds {len(saved)} parameters of the optimizer, this one has "
                f"{len(present)}"
            )
        for index, (then, now) in enumerate(zip(saved, present, strict=True)):
            if then != now:
                raise CheckpointError(
                    f"parameter {index} of the optimizer was {_say(then)} when {self.folder} was "
                    f"saved, and is {_say(now)} now"
                )

    def _read_model(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = dict(decode_tree(tree["others"], self._copy))
        for file in self._model:
            found |= {name: file.read(name) for name in file.names}
        found |= {name: self._own.read(f"own.{name}") for name in tree["own"]}
        return found

    def _take_left_out(self, tree: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Take from the model what the checkpoint leaves to it.

        Raises:
            CheckpointError: It is not what the model had when the checkpoint was saved.
        """
        saved, present = tree.get("left_out", {}), model.state_dict()
        found = {name: present[name] for name in saved if isinstance(present.get(name), Tensor)}
        digests = dict(zip(found, digest_entries(found), strict=True))
        wrong = [name for name, digest in saved.items() if digests.get(name) != digest]
        if wrong:
            raise CheckpointError(
                f"{self.folder} holds what was trained only, and {wrong[0]} (one of {len(wrong)}), "
                "which was not, is not what it was then: begin with the same model"
            )
        return found

    def _read_optimizer(self, tree: Mapping[str, Any], optimizer: VotingBase) -> dict[str, Any]:
        present = optimizer.state_dict()
        groups = decode_tree(tree["groups"], self._copy)
        joined = [
            {**group, "params": own["params"]}
            for group, own in zip(groups, present["param_groups"], strict=True)
        ]
        shapes = {
            index: torch.Size(shape)
            for index, (_, shape, _, exp_avg_dtype) in enumerate(tree["layout"])
            if exp_avg_dtype is not None
        }
        state = {
            index: {
                key: self._build(f"{key}.{index}", shape)
                for key in KEPT
                if key == "exp_avg" or self._has(f"{key}.{index}")
            }
            for index, shape in shapes.items()
        }
        return {"state": state, "param_groups": joined}

    def _has(self, name: str) -> bool:
        """Return whether workers have saved a tensor; under "reset" no file is open, nor needed."""
        return any(name in file.names for files in self._momenta.values() for file in files)

    def _build(self, name: str, shape: torch.Size) -> Tensor:
        """Return what the workers of this process begin with of one momentum or estimate."""
        rows = []
        for shares in self._shares.values():
            momenta = [self._join(voter, name, shape) for voter, _ in shares]
            rows.append(mix_momenta(momenta, shares) if shares else torch.zeros(shape))
        return torch.stack(rows) if self._custody.is_stacked else rows[0]

    def _join(self, voter: int, name: str, shape: torch.Size) -> Tensor:
        """Put a voter's tensor together: the ranks of a node have a piece of it each."""
        files = self._momenta[voter]
        whole = torch.cat([file.read(name).reshape(-1) for file in files])
        if whole.numel() != shape.numel():
            raise CheckpointError(
                f"{files[0].path}: {name.replace('exp_avg.', 'momentum ')} has {whole.numel()} "
                f"elements, the parameter {shape.numel()}"
            )
        return whole.reshape(shape)


def _say(parameter: Sequence[Any]) -> str:
    name, shape, dtype, exp_avg_dtype = parameter
    momentum = "frozen" if exp_avg_dtype is None else f"momentum in {exp_avg_dtype}"
    return f"{name} {tuple(shape)}, {dtype}, {momentum}"


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Check what ``model.load_state_dict`` would refuse halfway."""
    present = model.state_dict()
    for where, names in (("checkpoint", present.keys() - saved), ("model", saved.keys() - present)):
        if names:
            raise CheckpointError(f"the {where} has no {', '.join(sorted(names)[:5])}")
    for name, value in present.items():
        then, now = (
            (tuple(each.shape), each.dtype) if isinstance(each, Tensor) else None
            for each in (saved[name], value)
        )
        if then != now:
            raise CheckpointError(f"{name} is {then} in the checkpoint, {now} in the model")

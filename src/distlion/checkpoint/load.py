"""Reading what a process needs of a checkpoint: files compared with their sums, then parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlion.checkpoint.contents import OUTSIDE, describe_layout, digest_entries
from distlion.checkpoint.folder import find_checkpoint
from distlion.checkpoint.manifest import Manifest, read_manifest
from distlion.checkpoint.remap import (
    Share,
    WorldChange,
    mix_momenta,
    share_out,
)
from distlion.checkpoint.tensor_file import TensorFile, check_file
from distlion.checkpoint.tree import decode_tree
from distlion.checkpoint.writer import TREE
from distlion.errors import CheckpointError
from distlion.optim import KEPT, VotingBase
from distlion.voting import Custody


@dataclass(frozen=True)
class Parsed:
    """All that is to be loaded, once everybody has it."""

    model: dict[str, Any]
    outside: dict[int, Tensor]
    optimizer: dict[str, Any]
    scheduler: Any
    extra: Any


class Reader:
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

    def parse(self, model: nn.Module, optimizer: VotingBase, scheduler: Any | None) -> Parsed:
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
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._own.path} is malformed ({error!r})") from error
        if scheduler is not None and schedule is None:
            raise CheckpointError(f"{self.folder} holds no scheduler's state; give scheduler=None")
        return Parsed(saved, outside, state, schedule, extra)

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

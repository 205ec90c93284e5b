"""Reading: one process's view of a checkpoint, parsed and compared with what it is loaded into."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlion.checkpoint.contents import (
    INNER,
    LOCAL_NAMES,
    OUTSIDE,
    ParsedLocal,
    check_kinds,
    describe_layout,
    digest_entries,
    digest_layout,
    list_params,
    name_params,
    parse_local,
)
from distlion.checkpoint.folder import Manifest, find_checkpoint, read_manifest
from distlion.checkpoint.remap import Share, WorldChange, keep_shares, mix_momenta, share_out
from distlion.checkpoint.tensor_file import TensorFile, check_file
from distlion.checkpoint.tree import TREE, decode_tree
from distlion.errors import CheckpointError
from distlion.kernels.coin import COINS
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase, read_state
from distlion.optim.saved_groups import describe_move
from distlion.peers.ownership import MomentumOwnership
from distlion.step.param import is_wrapper
from distlion.votes.registry import parse_rule


@dataclass(frozen=True)
class Parsed:
    """The state to load, once all processes have read theirs."""

    model: dict[str, Any]
    outside: dict[int, Tensor]
    optimizer: dict[str, Any]
    scheduler: Any
    extra: Any
    local: ParsedLocal | None


class Reader:
    """One process's view of a checkpoint.

    Args:
        path: The run's folder, or the checkpoint's.
        ownership: The momenta that this process keeps.
        on_world_change: The rule for another number of workers.
        stack: Stack that closes files.

    Raises:
        CheckpointError: A file that this process needs is missing or damaged.
    """

    def __init__(
        self,
        path: Path,
        ownership: MomentumOwnership,
        on_world_change: WorldChange,
        stack: ExitStack,
    ) -> None:
        self.folder = find_checkpoint(path)
        self.manifest: Manifest = read_manifest(self.folder)
        self._ownership = ownership
        self._stack = stack
        if self.manifest.seed != ownership.seed:
            raise CheckpointError(
                f"{self.folder} was saved with seed={self.manifest.seed}, and this optimizer has "
                f"seed={ownership.seed}: ties would be broken differently; give the saved seed"
            )
        if self.manifest.coins != COINS:
            raise CheckpointError(
                f"{self.folder} was saved with version {self.manifest.coins} of the coins, by "
                f"distlion {self.manifest.distlion}, and this distlion has version {COINS}: ties "
                "would be broken differently; continue with that distlion"
            )
        voters = sorted({worker // ownership.node_size for worker in ownership.workers})
        self._shares: dict[int, list[Share]] = {
            voter: share_out(
                voter,
                saved=self.manifest.n_voters,
                present=ownership.n_voters,
                rule=on_world_change,
            )
            for voter in voters
        }
        # The process that was in this one's place.
        twin = ownership.process * self.manifest.processes // ownership.n_processes
        self._own = self._open(f"process-{twin:05d}.safetensors")
        self._model = [self._open(name) for name in self._find_model_files()]
        size = self.manifest.node_size
        self._momenta = {
            voter: [
                self._open(f"worker-{worker:05d}.safetensors")
                for worker in range(voter * size, (voter + 1) * size)
            ]
            for voter in sorted({number for each in self._shares.values() for number, _ in each})
        }

    def _find_model_files(self) -> list[str]:
        """Return the model files that were written to one folder, which hold the whole model."""
        led: dict[int, list[str]] = {}
        for process, leader in enumerate(self.manifest.leaders):
            led.setdefault(leader, []).append(f"model-{process:05d}.safetensors")
        names: list[str] = []
        for _, names in sorted(led.items()):
            if all((self.folder / name).exists() for name in names):
                break
        return names

    def _open(self, name: str) -> TensorFile:
        path = self.folder / name
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.folder} lists no {name}")
        check_file(path, self.manifest.files[name])
        return TensorFile(path, self._stack)

    def parse(
        self,
        model: nn.Module,
        optimizer: VotingBase,
        scheduler: Any | None,
        local: LocalSteps | None = None,
    ) -> Parsed:
        """Parse everything, and check that it fits; ``local`` is around the optimizer, or None.

        Raises:
            CheckpointError: It does not fit.
        """
        check_kinds(model, scheduler)
        try:
            tree: dict[str, Any] = json.loads(bytes(self._own.read(TREE).numpy()))
            self._check_digest(tree)
            tree, saved = name_as(model, optimizer, tree, self._read_model(tree))
            self._check_layout(tree, optimizer, model)
            saved |= self._take_left_out(tree, model)
            aliases = tree["aliases"].items()
            saved |= {name: saved[other] for name, other in aliases if name not in saved}
            outside = self._take_outside(tree, saved)
            _check_model(saved, model)
            state = self._read_optimizer(tree, optimizer)
            schedule = decode_tree(tree["scheduler"], self._own.take)
            extra = decode_tree(tree["extra"], self._own.take)
            around = None
            if local is not None:
                self._check_local_names(tree, name_params(model, list_params(local)))
                around = parse_local(tree, local, self._own.take, self._build_own)
        except CheckpointError:
            raise
        # Forged indices, sizes and shapes can raise any error.
        except Exception as error:
            raise CheckpointError(f"{self._own.path} is malformed ({error!r})") from error
        if scheduler is not None:
            check_schedule(self.folder, schedule, scheduler)
        return Parsed(saved, outside, state, schedule, extra, around)

    def _check_digest(self, tree: Mapping[str, Any]) -> None:
        if digest_layout(tree["layout"]) != self.manifest.layout:
            raise CheckpointError(
                f"{self._own.path} lists other parameters than the manifest of {self.folder}. "
                "Expected the same ones. Load an earlier checkpoint by its name"
            )

    def _check_layout(
        self, tree: Mapping[str, Any], optimizer: VotingBase, model: nn.Module
    ) -> None:
        """Check that the optimizer has the saved parameters, in the saved groups.

        A momentum may be missing on one side, for a parameter that was frozen there from the start.
        """
        saved, present = tree["layout"], describe_layout(model, optimizer)
        if len(saved) != len(present):
            raise CheckpointError(
                f"{self.folder} holds {len(saved)} parameters of the optimizer, this one has "
                f"{len(present)}"
            )
        params = list_params(optimizer)
        for index, (then, now) in enumerate(zip(saved, present, strict=True)):
            momentum = now[3] or str(optimizer.momentum_make(params[index]).dtype)
            fits = not optimizer.keeps_momenta or then[3] in (None, momentum)
            if then[:3] != now[:3] or not fits:
                raise CheckpointError(
                    f"parameter {index} of the optimizer was {_say(then)} when {self.folder} was "
                    f"saved, and is {_say(now)} now"
                )
        self._check_division(tree, optimizer, [name for name, *_ in saved])

    def _check_local_names(self, tree: Mapping[str, Any], present: Sequence[str]) -> None:
        """Check that the inner optimizer has the saved parameters in the saved order."""
        saved = tree.get(LOCAL_NAMES, present)  # earlier versions saved none
        rename = _rename(saved, present)
        for index, (then, now) in enumerate(zip(saved, present, strict=False)):
            if rename(then) != now:
                raise CheckpointError(
                    f"parameter {index} of the inner optimizer was {then} when {self.folder} was "
                    f"saved, and is {now} now. Expected the same order. Make the inner optimizer "
                    "from the parameters in the saved order"
                )

    def _check_division(
        self, tree: Mapping[str, Any], optimizer: VotingBase, names: Sequence[str]
    ) -> None:
        """Check that each parameter is still in the group whose lr and other settings it had."""
        present = [len(group["params"]) for group in optimizer.param_groups]
        # Format 1 holds the number of groups only.
        then = tree["division"] if self.manifest.format > 1 else present
        moved = describe_move(then, present, lambda number, group, index: names[number])
        if moved or then != present or len(tree["groups"]) != len(present):
            raise CheckpointError(
                f"{self.folder} was saved from {len(tree['groups'])} groups of {then} parameters, "
                f"this optimizer's hold {present}{moved and f': {moved}'}. Expected the same "
                "parameters in each group, as lr and other settings are theirs. Make the "
                "optimizer with the groups that were saved"
            )

    def _read_model(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = dict(decode_tree(tree["others"], self._own.take))
        for file in self._model:
            found |= {name: file.read(name) for name in file.names}
        found |= {name: self._own.read(f"own.{name}") for name in tree["own"]}
        return found

    def _take_left_out(self, tree: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Take from the model the tensors that the checkpoint leaves out.

        So are wrappers under another name of one of them: earlier versions took all of a shape for
        one tensor.

        Raises:
            CheckpointError: They differ from the model's when the checkpoint was saved.
        """
        saved, present = tree.get("left_out", {}), model.state_dict()
        found = {name: present[name] for name in saved if isinstance(present.get(name), Tensor)}
        digests = dict(zip(found, digest_entries(found), strict=True))
        wrong = [name for name, digest in saved.items() if digests.get(name) != digest]
        if wrong:
            raise CheckpointError(
                f"{self.folder} holds trained tensors only, and {wrong[0]} (one of {len(wrong)}), "
                "which was not trained, has changed since then: begin with the same model"
            )
        again = [name for name, other in tree["aliases"].items() if other in found]
        return found | {name: present[name] for name in again if is_wrapper(present.get(name))}

    def _take_outside(self, tree: Mapping[str, Any], saved: dict[str, Any]) -> dict[int, Tensor]:
        """Take the optimizer's parameters that the model's state does not have."""
        outside = {}
        for index, (listed, shape, dtype, _) in enumerate(tree["layout"]):
            name = f"{OUTSIDE}{index}"
            if name in (listed, *saved):
                outside[index] = value = saved.pop(name)
                if list(value.shape) != shape or str(value.dtype) != dtype:
                    raise CheckpointError(
                        f"{self.folder}: {name} is {tuple(value.shape)}, {value.dtype}; expected "
                        f"{tuple(shape)}, {dtype}"
                    )
        return outside

    def _read_optimizer(self, tree: Mapping[str, Any], optimizer: VotingBase) -> dict[str, Any]:
        present = read_state(optimizer)
        groups = decode_tree(tree["groups"], self._own.take)
        if any(group["step"] != self.manifest.step for group in groups):
            raise CheckpointError(
                f"{self._own.path} is at step {groups[0]['step']}, and the manifest of "
                f"{self.folder} at step {self.manifest.step}. Expected the same step. Load an "
                "earlier checkpoint by its name"
            )
        joined = [
            {**group, "params": own["params"]}
            for group, own in zip(groups, present["param_groups"], strict=True)
        ]
        rules = [parse_rule(group["aggregation"]) for group in joined for _ in group["params"]]
        state = {}
        for index, (_, size, _, exp_avg_dtype) in enumerate(tree["layout"]):
            shape = torch.Size(size)
            # Earlier versions saved momenta of votes on deltas, too, which have none.
            dtypes = {"exp_avg": exp_avg_dtype} if optimizer.keeps_momenta else {}
            dtypes |= dict.fromkeys(rules[index].worker_state, str(torch.float32))
            if dtypes.get("exp_avg") or any(self._has(f"{key}.{index}") for key in dtypes):
                state[index] = {
                    key: self._build(f"{key}.{index}", shape, dtype)
                    for key, dtype in dtypes.items()
                }
            elif index in present["state"]:  # frozen then, and trained now
                state[index] = {"exp_avg": torch.zeros(shape, dtype=torch.float32, device="cpu")}
        return {"state": state, "param_groups": joined}

    def _has(self, name: str) -> bool:
        """Return whether some worker whose file is open here has saved a tensor."""
        return any(name in file.names for files in self._momenta.values() for file in files)

    def _build(self, name: str, shape: torch.Size, dtype: str | None) -> Tensor:
        """Return the start value of a per-worker tensor for the workers of this process."""
        rows = []
        for shares in self._shares.values():
            momenta = [self._join(self._momenta[voter], name, shape, dtype) for voter, _ in shares]
            rows.append(
                mix_momenta(momenta, shares)
                if shares
                else torch.zeros(shape, dtype=torch.float32, device="cpu")
            )
        return torch.stack(rows) if self._ownership.is_stacked else rows[0]

    def _build_own(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return the start value of a per-rank tensor, which each rank of a node has too."""
        (shares,) = self._shares.values()
        place = self._ownership.workers[0] % self._ownership.node_size
        last = min(place, self.manifest.node_size - 1)
        files = {voter: self._momenta[voter][last : last + 1] for voter, _ in shares}
        if name.startswith(INNER):  # a worker without a gradient has no inner state
            having = [each for each in shares if name in files[each[0]][0].names]
            shares = keep_shares(having) if having else shares
        rows = [self._join(files[voter], name, shape, None) for voter, _ in shares]
        return mix_momenta(rows, shares) if shares else None

    def _join(
        self, files: Sequence[TensorFile], name: str, shape: torch.Size, dtype: str | None
    ) -> Tensor:
        """Assemble a tensor of which each file has a piece, as each rank of a node does."""
        whole = torch.cat([file.read(name).reshape(-1) for file in files])
        what = name.replace("exp_avg.", "momentum ")
        if whole.numel() != shape.numel():
            raise CheckpointError(
                f"{files[0].path}: {what} has {whole.numel()} elements, the parameter "
                f"{shape.numel()}"
            )
        if dtype not in (None, str(whole.dtype)):
            raise CheckpointError(
                f"{files[0].path}: {what} is {whole.dtype}; expected {dtype}, as its layout says"
            )
        return whole.reshape(shape)


_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.")
"""Prefixes of names in the state of DDP, of ``torch.compile`` and of Fabric's wrapper."""
_MOST_WRAPPERS = 8


def find_wrappers(names: Iterable[str]) -> str:
    """Return the prefix of wrappers that all of these names have; "" for none."""
    found, inside = "", [name for name in names if not name.startswith(OUTSIDE)]
    for _ in range(_MOST_WRAPPERS if inside else 0):
        more = [each for each in _WRAPPERS if all(name.startswith(found + each) for name in inside)]
        if not more:
            break
        found += more[0]
    return found


def _rename(then: Iterable[str], now: Iterable[str]) -> Callable[[str], str]:
    """Return a function that gives a name the wrappers of the names ``now`` for those ``then``."""
    before, after = find_wrappers(then), find_wrappers(now)
    return lambda name: name if name.startswith(OUTSIDE) else after + name.removeprefix(before)


def name_as(
    model: nn.Module, optimizer: VotingBase, tree: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rename what was saved as in a model, which may have other wrappers around it.

    Args:
        model: The model.
        optimizer: The optimizer, whose parameters may have other wrappers than the model's state.
        tree: The tree of a process.
        saved: Its model's state by name.

    Returns:
        Both, with other names.
    """
    aliases, left_out, layout = tree["aliases"], tree.get("left_out", {}), tree["layout"]
    present = describe_layout(model, optimizer)
    voted = _rename([name for name, *_ in layout], [name for name, *_ in present])
    held = _rename([*saved, *aliases, *left_out], model.state_dict())
    renamed = {
        **tree,
        "layout": [[voted(name), *rest] for name, *rest in layout],
        "aliases": {held(name): held(other) for name, other in aliases.items()},
        "left_out": {held(name): digest for name, digest in left_out.items()},
    }
    return renamed, {held(name): value for name, value in saved.items()}


def _say(parameter: Sequence[Any]) -> str:
    name, shape, dtype, exp_avg_dtype = parameter
    momentum = "frozen" if exp_avg_dtype is None else f"momentum in {exp_avg_dtype}"
    return f"{name} {tuple(shape)}, {dtype}, {momentum}"


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Check in advance what ``model.load_state_dict`` would refuse halfway."""
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


_PLAIN = (int, float, str, list, tuple, Mapping, type(None))


def check_schedule(folder: Path, saved: Any, scheduler: Any) -> None:
    """Check that a saved state changes only the state of a scheduler.

    Raises:
        CheckpointError: There is none, or it would replace a method or the optimizer.
    """
    if saved is None:
        raise CheckpointError(f"{folder} holds no scheduler's state; give scheduler=None")
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"{folder} holds a {type(saved).__name__} as the scheduler's state; expected a dict"
        )
    present = scheduler.state_dict()
    wrong = [
        key
        for key in saved
        if key not in present and not isinstance(getattr(scheduler, str(key), None), _PLAIN)
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} would replace the scheduler's {str(wrong[0])[:80]!r}, which is not part of "
            "its state; expected what state_dict() returns"
        )
    for key in present.keys() & saved.keys():
        now, then = present[key], saved[key]
        if now is not None and then is not None and not _is_alike(now, then):
            raise CheckpointError(
                f"{folder} holds {str(then)[:80]!r} as the scheduler's {key!r}; expected a value "
                f"like {str(now)[:80]!r}"
            )


def _is_alike(now: Any, then: Any) -> bool:
    """Return whether both are numbers, both lists of alike items, or both dicts."""
    if _is_number(now):
        return _is_number(then)
    if isinstance(now, list | tuple):
        if not isinstance(then, list | tuple):
            return False
        # Lengths may differ, as of milestones: each must be like the first one.
        alike = now if len(now) == len(then) else now[:1] * len(then)
        return all(map(_is_alike, alike, then))
    return isinstance(then, Mapping) if isinstance(now, Mapping) else True


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one, as a learning rate may be."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)

"""The contents of a checkpoint, collected before anything is written; and those of local steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from distlion.checkpoint.tensor_file import check_dense
from distlion.checkpoint.tree import decode_tree, encode_tree
from distlion.errors import CheckpointError
from distlion.kernels.dispatch import choose_kernels
from distlion.local.inner_optimizers import InnerOptimizers, check_owners
from distlion.local.local_steps import LocalSteps
from distlion.local.state import check_shapes, export_progress, parse_progress
from distlion.local.votes import Progress
from distlion.optim.base import VotingBase, read_state
from distlion.optim.saved_groups import WORKER_KEY, check_division
from distlion.optim.saved_state import list_kept
from distlion.peers.ownership import MomentumOwnership
from distlion.peers.replicas import fold_digests
from distlion.step.param import list_plain, view_row

LOCAL, LOCAL_NAMES = "local", "local_names"
"""Keys of the tree: state of one worker or of all that is not a row of ``worker-...`` files; names
of the inner optimizer's parameters."""

INNER = "inner."
"""Prefix of the names of rows that hold inner state."""

Build = Callable[[str, torch.Size], Tensor | None]
"""A function that returns this worker's start value of a per-worker tensor, or None to reset."""


def take_apart(optimizer: Any) -> tuple[Any, LocalSteps | None]:
    """Return the optimizer that votes, and the ``LocalSteps`` around it or None."""
    if isinstance(optimizer, LocalSteps):
        return optimizer.outer_optimizer, optimizer
    return optimizer, None


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """List an optimizer's parameters in group order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def list_changing(votes: VotingBase, local: LocalSteps | None) -> list[Any]:
    """List the objects beside the model that a load changes, to restore them if it fails."""
    kept: list[Any] = [votes.param_groups]
    if local is not None:
        kept += [vars(local), vars(local.inner), local.outer_buffers]
        if isinstance(local.inner, InnerOptimizers):
            kept += [vars(each) for each in local.inner.optimizers]
    return kept


def replace_by_common(model: nn.Module, local: LocalSteps, entries: dict[str, Tensor]) -> set[str]:
    """Replace this worker's parameters by the common point; return their names."""
    common = dict(local.list_pairs())
    owners = find_owners(model, common, entries)
    for name, param in owners.items():
        value, entry = common[param].detach().to(param.device, param.dtype), entries[name]
        if _describe(entry)[:2] != _describe(param)[:2] and _lies_inside(entry, param):
            value = _take_part(entry, param, value.contiguous())
        entries[name] = value
    return set(owners)


def find_owners(
    model: nn.Module, params: Iterable[Tensor], entries: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Find the entries of a model's state that are one of these parameters, or a part of one.

    An entry has its parameter's name, or its memory: wrappers and hooks give other names, and may
    cut a parameter.

    Returns:
        The parameter by the entry's name.
    """
    wanted = set(params)
    # A tied weight has several names; its entry has one of them.
    named = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[str, Tensor] = {}
    placed = sorted((param for param in wanted if param.numel()), key=Tensor.data_ptr)
    begins = [param.data_ptr() for param in placed]
    for name, entry in entries.items():
        if name in named and named[name] in wanted:
            owners[name] = named[name]
            continue
        place = bisect_right(begins, entry.data_ptr()) - 1
        if place >= 0 and _lies_inside(entry, placed[place]):
            owners[name] = placed[place]
    return owners


def _lies_inside(entry: Tensor, param: Tensor) -> bool:
    """Return whether the memory of a tensor is that of a parameter, or a part of it."""
    own, whole = _describe(entry), _describe(param)
    # Wrappers, such as quantized weights, are all at address 0.
    if not entry.numel() or not entry.data_ptr() or own[2:] != whole[2:]:
        return False
    if not param.is_contiguous():  # other tensors may lie between its elements
        return entry.data_ptr() == param.data_ptr() and own == whole
    sizes = zip(entry.shape, entry.stride(), strict=True)
    last = entry.data_ptr() + param.element_size() * sum((n - 1) * stride for n, stride in sizes)
    return param.data_ptr() <= entry.data_ptr() and last < param.data_ptr() + param.nbytes


def _take_part(entry: Tensor, param: Tensor, like: Tensor) -> Tensor:
    """Take the part of a tensor that an entry is of a contiguous parameter of the same shape."""
    offset = (entry.data_ptr() - param.data_ptr()) // param.element_size()
    return like.as_strided(entry.shape, entry.stride(), like.storage_offset() + offset)


def collect_local(
    local: LocalSteps, tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the part of the tree, and the rows of a worker.

    Args:
        local: The optimizer.
        tensors: Dict that takes the tensors of the tree.

    Returns:
        The state that is saved unchanged; and for each parameter, the worker's values and the
        tensors of its inner state that are like the parameter. These are remapped like momenta if
        the number of workers changes.

    Raises:
        CheckpointError: The inner state holds values that cannot be saved.
    """
    inner = local.inner.state_dict()
    params = list_params(local)
    moving = dict(local.list_pairs())
    rows = {
        f"{LOCAL}.{index}": param.detach() for index, param in enumerate(params) if param in moving
    }
    rest: dict[Any, dict[str, Any]] = {}
    for index, entry in inner["state"].items():
        rest[index] = {}
        for key, value in entry.items():
            if isinstance(index, int) and _is_like(value, params[index]):
                rows[f"{INNER}{key}.{index}"] = value
                rest[index][key] = {"row": f"{INNER}{key}.{index}"}
            else:
                rest[index][key] = {"value": value}
    tree = {
        **export_progress(local.progress, local.every),
        "outer_momentum": [each.detach() for each in local.outer_buffers],
        "state": rest,
        "groups": inner["param_groups"],
    }
    beside = {key: inner[key] for key in inner if key not in ("state", "param_groups")}
    if beside:
        tree["beside"] = beside
    encoded: dict[str, Any] = encode_tree(tree, LOCAL, tensors)
    return encoded, rows


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point()


@dataclass(frozen=True)
class ParsedLocal:
    """The state to load beside the votes, once all processes have read theirs.

    Attributes:
        own: This worker's values of each parameter, by its number; none where it begins anew.
        progress: This worker's place between votes.
        inner: The inner optimizer's state dict.
        outer_momentum: The outer momentum, in the order of the parameters that votes move.
    """

    own: Mapping[int, Tensor]
    progress: Progress
    inner: dict[str, Any]
    outer_momentum: list[Tensor]

    def apply(self, local: LocalSteps) -> None:
        """Overwrite all of it; the common point has been loaded before."""
        params = list_params(local)
        with torch.no_grad():
            for index, value in self.own.items():
                params[index].copy_(value)
            buffers = local.outer_buffers
            for buffer, saved in zip(buffers, self.outer_momentum, strict=True):
                buffer.copy_(saved)
        with torch.inference_mode(False):  # it may convert tensors, which steps then write to
            local.inner.load_state_dict(self.inner)
        local.progress = self.progress


@torch.inference_mode(False)
def parse_local(
    tree: Mapping[str, Any], local: LocalSteps, read: Callable[[str], Tensor], build: Build
) -> ParsedLocal:
    """Parse it, and check that it fits.

    Args:
        tree: The tree of this worker's file.
        local: The optimizer.
        read: Function that reads a tensor of the tree.
        build: Function that reads and mixes rows.

    Raises:
        CheckpointError: It does not fit, or another kind of optimizer saved the checkpoint.
    """
    if LOCAL not in tree:
        raise CheckpointError(
            "the checkpoint was saved from an optimizer without local steps. Expected one of "
            "LocalSteps. Load it into the optimizer that saved it"
        )
    saved = decode_tree(tree[LOCAL], read)
    progress = parse_progress(saved, local.every, "the checkpoint")
    check_shapes("outer_momentum", saved["outer_momentum"], local.outer_buffers)
    check_owners(local.inner, saved["groups"])
    check_division(saved["groups"], local.param_groups)
    own: dict[int, Tensor] = {}
    state: dict[Any, dict[str, Any]] = {}
    moving = dict(local.list_pairs())
    params = list_params(local)
    for index, param in enumerate(params):
        value = build(f"{LOCAL}.{index}", param.shape) if param in moving else None
        if value is not None:
            own[index] = value
    # Where workers begin anew, a fresh state has nothing, rather than zeros.
    entries = saved["state"] if own or not moving else {}
    for index, entry in entries.items():
        state[index] = {}
        for key, found in entry.items():
            row = found.get("row")  # only of parameters, which have numbers
            value = found["value"] if row is None else build(row, params[index].shape)
            state[index][key] = value
    inner = {**saved.get("beside", {}), "state": state, "param_groups": saved["groups"]}
    return ParsedLocal(own, progress, inner, saved["outer_momentum"])


OUTSIDE = "parameter outside of the model: "
"""Prefix to the number of an optimizer's parameter that the model's state does not have."""


@dataclass(frozen=True)
class Contents:
    """The state that one process has to save.

    Attributes:
        step: Steps committed.
        model: Tensors of the model's state by name, each storage once.
        replicated: Names of the tensors that the optimizer keeps equal on all processes.
        untrained: Names of those that are known as buffers, or as parameters that are not trained.
        tree: All else, as JSON; its tensors are in ``tensors``.
        tensors: Tensors of the tree by name.
        momenta: For each worker that is kept here, its momenta and the rules' state by name.
    """

    step: int
    model: dict[str, Tensor]
    replicated: frozenset[str]
    untrained: frozenset[str]
    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    momenta: dict[int, dict[str, Tensor]]

    @property
    def layout_digest(self) -> str:
        """Return the SHA-256 of the optimizer's parameters: names, shapes, dtypes."""
        return digest_layout(self.tree["layout"])

    def snapshot(self, left_out: Set[str]) -> Contents:
        """Copy all tensors but these of the model to host memory, so that training can go on."""
        return replace(
            self,
            model=_copy({name: self.model[name] for name in self.model if name not in left_out}),
            tensors=_copy(self.tensors),
            momenta={worker: _copy(row) for worker, row in self.momenta.items()},
        )


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def collect(
    model: nn.Module,
    optimizer: VotingBase,
    scheduler: Any | None,
    extra: Any,
    ownership: MomentumOwnership,
    local: LocalSteps | None = None,
) -> Contents:
    """Collect the state that this process has to save, with ``local`` around the optimizer or None.

    Raises:
        CheckpointError: Some of it cannot be saved, or the state is between two steps.
    """
    check_kinds(model, scheduler)
    state = read_state(optimizer)
    tensors: dict[str, Tensor] = {}
    entries, aliases, others = _split_model(model)
    voted = list_params(optimizer)
    owners = find_owners(model, voted, entries)
    outside = _list_outside(model, voted, entries, aliases, owners)
    tree = {
        "aliases": aliases,
        "others": encode_tree(others, "model", tensors),
        "layout": describe_layout(model, optimizer),
        "division": [len(group["params"]) for group in state["param_groups"]],
        "groups": encode_tree(_strip_groups(state["param_groups"]), "groups", tensors),
        "scheduler": encode_tree(
            None if scheduler is None else scheduler.state_dict(), "scheduler", tensors
        ),
        "extra": encode_tree(extra, "extra", tensors),
    }
    momenta: dict[int, dict[str, Tensor]] = {worker: {} for worker in ownership.workers}
    for index, entry in state["state"].items():
        for worker in ownership.workers:
            for key in list_kept(entry):
                kept = entry[key]
                momenta[worker][f"{key}.{index}"] = kept[worker] if ownership.is_stacked else kept
    common: set[str] = set()
    if local is not None:
        tree[LOCAL], rows = collect_local(local, tensors)
        tree[LOCAL_NAMES] = name_params(model, list_params(local))
        momenta[ownership.workers[0]] |= rows
        common = replace_by_common(model, local, entries)
    entries |= outside
    replicated = frozenset({*owners, *common, *outside})
    return Contents(
        optimizer.committed_step,
        entries,
        replicated,
        _list_untrained(model, entries) - replicated,
        tree,
        tensors,
        momenta,
    )


def check_kinds(model: object, scheduler: object) -> None:
    """Check that what was given as the model and as the scheduler can be.

    Raises:
        CheckpointError: It cannot, such as the model's ``state_dict()`` or a list of schedulers.
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"model is a {type(model).__name__}; expected the torch.nn.Module itself"
        )
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise CheckpointError(
            f"scheduler is a {type(scheduler).__name__}; expected one scheduler, or None. Put the "
            "state_dict() of several into extra, and load each yourself"
        )


def _strip_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what a load finds again by itself: parameters, names, and the momenta's owner."""
    dropped = {"params", "param_names", WORKER_KEY}
    return [{key: group[key] for key in group if key not in dropped} for group in groups]


def _split_model(
    model: nn.Module,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Return a model's tensors, the aliases among their names, and all that is not a tensor."""
    entries: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        if hasattr(value, "to_local"):
            raise CheckpointError(f"{name} is a DTensor, which a checkpoint cannot hold yet")
        check_dense(name, value)
        # Wrappers, such as quantized weights, are all at address 0.
        places = tuple((plain.data_ptr(), *_describe(plain)) for plain in list_plain(value))
        key = type(value), _describe(value), places
        if value.numel() and key in first:
            aliases[name] = first[key]
        else:
            first.setdefault(key, name)
            entries[name] = value
    return entries, aliases, others


def _list_untrained(model: nn.Module, entries: Mapping[str, Tensor]) -> frozenset[str]:
    """List entries that are whole buffers or frozen parameters, by name or by memory.

    What a hook computes anew from any tensors is none of them.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    known = dict(model.named_buffers(remove_duplicate=False))
    known |= {name: param for name, param in parameters if not param.requires_grad}
    places = {_list_places(tensor) for tensor in known.values()}
    return frozenset(
        name for name, entry in entries.items() if name in known or _list_places(entry) in places
    )


def _list_places(tensor: Tensor) -> tuple[int, ...]:
    # Wrappers, such as quantized weights, are all at address 0.
    return tuple(plain.data_ptr() or id(plain) for plain in list_plain(tensor))


def _list_outside(
    model: nn.Module,
    voted: Sequence[Tensor],
    entries: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    owners: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """List the optimizer's parameters of which the model's state lacks elements."""
    named = model.named_parameters(remove_duplicate=False)
    called: set[Tensor] = {param for name, param in named if name in entries or name in aliases}
    found: dict[Tensor, Tensor] = {}
    for name, param in owners.items():
        if param not in called and param.is_contiguous():
            marks = torch.zeros(param.shape, dtype=torch.bool, device="cpu")
            _take_part(entries[name], param, found.setdefault(param, marks)).fill_(True)
        elif param not in called:
            called.add(param)  # its one entry is all of it
    called |= {param for param, marks in found.items() if bool(marks.all())}
    return {
        f"{OUTSIDE}{index}": param.detach()
        for index, param in enumerate(voted)
        if param not in called
    }


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    kind = tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), *kind


def name_params(model: nn.Module, params: Sequence[Tensor]) -> list[str]:
    """Name parameters as in a model, and those outside of it by their numbers."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    return [names.get(param, f"{OUTSIDE}{number}") for number, param in enumerate(params)]


def describe_layout(model: nn.Module, optimizer: VotingBase) -> list[list[Any]]:
    """List the optimizer's parameters in order: [name, shape, dtype, dtype of the momentum].

    The last one is None for a parameter that was never trained and so has no momentum.
    """
    layout, params = [], list_params(optimizer)
    for name, param in zip(name_params(model, params), params, strict=True):
        exp_avg = optimizer.state.get(param, {}).get("exp_avg")
        layout.append(
            [
                name,
                list(param.shape),
                str(param.dtype),
                None if exp_avg is None else str(exp_avg.dtype),
            ]
        )
    return layout


def digest_layout(layout: list[list[Any]]) -> str:
    """Digest the result of ``describe_layout``, for the manifest."""
    return sha256(repr(layout).encode()).hexdigest()


def digest_entries(entries: Mapping[str, Tensor]) -> list[int]:
    """Digest the bits of each tensor."""
    digests = []
    for tensor in entries.values():
        plain = [each.resolve_conj().resolve_neg() for each in list_plain(tensor.detach())]
        rows = [each.contiguous().reshape(-1) for each in plain]
        # Elements of 8 bytes are digested by bytes, as the kernels have none for them.
        rows = [view_row(row, torch.uint8) if row.element_size() > 4 else row for row in rows]
        parts = [choose_kernels(row.device).digests([row]).cpu() for row in rows]
        digests.append(int(fold_digests(torch.cat(parts))))
    return digests

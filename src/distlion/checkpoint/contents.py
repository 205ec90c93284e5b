"""The contents of a checkpoint, collected from model and optimizer before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from distlion.checkpoint.local import LOCAL, collect_local, list_params, replace_by_common
from distlion.checkpoint.tree import encode_tree
from distlion.errors import CheckpointError
from distlion.kernels.dispatch import choose_kernels
from distlion.local.local_steps import LocalSteps
from distlion.optim.base import VotingBase, read_state
from distlion.optim.saved_groups import WORKER_KEY
from distlion.optim.saved_state import list_kept
from distlion.peers.ownership import MomentumOwnership

OUTSIDE = "parameter outside of the model: "
"""Prefix to the number of an optimizer's parameter that the model does not have."""


@dataclass(frozen=True)
class Contents:
    """The state that one process has to save.

    Attributes:
        step: Steps committed.
        model: Tensors of the model's state by name, each storage once.
        replicated: Names of the tensors that the optimizer keeps equal on all processes.
        tree: All else, as JSON; its tensors are in ``tensors``.
        tensors: Tensors of the tree by name.
        momenta: For each worker that is kept here, its momenta and the rules' state by name.
    """

    step: int
    model: dict[str, Tensor]
    replicated: frozenset[str]
    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    momenta: dict[int, dict[str, Tensor]]

    @property
    def layout_digest(self) -> str:
        """Return the SHA-256 of the optimizer's parameters: names, shapes, dtypes."""
        return digest_layout(self.tree["layout"])

    def snapshot(self) -> Contents:
        """Copy all tensors to host memory, so that training can go on."""
        return replace(
            self,
            model=_copy(self.model),
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
    state = read_state(optimizer)
    tensors: dict[str, Tensor] = {}
    entries, aliases, others = _split_model(model)
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
        momenta[ownership.workers[0]] |= rows
        common = replace_by_common(model, local, entries)
    voted = list_params(optimizer)
    # A tied weight has several names; its entry has one of them.
    named = list(model.named_parameters(remove_duplicate=False))
    known, trained = {param for _, param in named}, set(voted)
    replicated = {name for name, param in named if param in trained and name in entries} | common
    for index, param in enumerate(voted):
        if param not in known:
            entries[f"{OUTSIDE}{index}"] = param.detach()
            replicated.add(f"{OUTSIDE}{index}")
    return Contents(
        optimizer.committed_step, entries, frozenset(replicated), tree, tensors, momenta
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
        key = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
        if value.numel() and key in first:
            aliases[name] = first[key]
        else:
            first.setdefault(key, name)
            entries[name] = value
    return entries, aliases, others


def describe_layout(model: nn.Module, optimizer: VotingBase) -> list[list[Any]]:
    """List the optimizer's parameters in order: [name, shape, dtype, dtype of the momentum].

    The last one is None for a parameter that was never trained and so has no momentum.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    layout = []
    for index, param in enumerate(list_params(optimizer)):
        exp_avg = optimizer.state.get(param, {}).get("exp_avg")
        layout.append(
            [
                names.get(param, f"{OUTSIDE}{index}"),
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
        row = tensor.detach().contiguous().reshape(-1)
        if row.element_size() > 4:  # of 8 bytes, which the kernels do not digest
            row = row.view(torch.uint8)
        digests.append(int(choose_kernels(row.device).digests([row])))
    return digests

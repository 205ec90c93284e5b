"""Checkpoints of workers with local steps: the state beside the votes on their common point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from distlion.checkpoint.tree import decode_tree, encode_tree
from distlion.errors import CheckpointError
from distlion.local.inner_optimizers import InnerOptimizers, check_owners
from distlion.local.local_steps import LocalSteps
from distlion.local.state import check_shapes, export_progress, parse_progress
from distlion.local.votes import Progress
from distlion.optim.base import VotingBase
from distlion.optim.saved_groups import check_division

LOCAL = "local"
"""Key of the tree: state of one worker or of all that is not a row of ``worker-...`` files."""

BEGUN = "begun"
"""Prefix of a worker's rows: its parameters at the start of a vote whose outcome is pending."""

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
    named = model.named_parameters(remove_duplicate=False)
    replaced = {name: param for name, param in named if param in common and name in entries}
    for name, param in replaced.items():
        entries[name] = common[param].detach().to(param.device, param.dtype)
    return set(replaced)


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
    progress = local.progress
    if progress.turn is not None:
        numbers = {param: index for index, param in enumerate(params)}
        voting = zip(local.list_pairs(progress.turn), progress.begun, strict=True)
        rows |= {f"{BEGUN}.{numbers[param]}": each for (param, _), each in voting}
    rest: dict[Any, dict[str, Any]] = {}
    for index, entry in inner["state"].items():
        rest[index] = {}
        for key, value in entry.items():
            if isinstance(index, int) and _is_like(value, params[index]):
                rows[f"inner.{key}.{index}"] = value
                rest[index][key] = {"row": f"inner.{key}.{index}"}
            else:
                rest[index][key] = {"value": value}
    tree = {
        **export_progress(progress, local.schedule),
        "outer_momentum": [each.detach() for each in local.outer_buffers],
        "state": rest,
        "groups": inner["param_groups"],
    }
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
        local.inner.load_state_dict(self.inner)
        local.progress = self.progress


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
    progress = parse_progress(saved, local.schedule, "the checkpoint")
    check_shapes("outer_momentum", saved["outer_momentum"], local.outer_buffers)
    check_owners(local.inner, saved["groups"])
    check_division(saved["groups"], local.param_groups)
    own: dict[int, Tensor] = {}
    begun: dict[Tensor, Any] = {}
    state: dict[Any, dict[str, Any]] = {}
    moving, late = dict(local.list_pairs()), progress.turn
    voting = dict(local.list_pairs(late)) if late is not None else {}
    params = list_params(local)
    for index, param in enumerate(params):
        value = build(f"{LOCAL}.{index}", param.shape) if param in moving else None
        if value is not None:
            own[index] = value
            if param in voting:
                begun[param] = build(f"{BEGUN}.{index}", param.shape)
    for index, entry in saved["state"].items():
        state[index] = {}
        for key, found in entry.items():
            value = build(found["row"], params[index].shape) if "row" in found else found["value"]
            if value is None:  # a fresh state has nothing, rather than zeros
                state.pop(index)
                break
            state[index][key] = value
    inner = {"state": state, "param_groups": saved["groups"]}
    # A worker that begins anew at the common point has nothing to take.
    progress = progress._replace(
        turn=late if begun else None, begun=[begun[param] for param in voting if begun]
    )
    return ParsedLocal(own, progress, inner, saved["outer_momentum"])

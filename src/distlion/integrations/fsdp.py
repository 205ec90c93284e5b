"""FSDP2 beside a voting optimizer: gradients are reduced within a worker, and never across."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distlion.errors import UnsupportedTypeError


def disable_all_reduce(model: nn.Module) -> None:
    """Let an FSDP2 model on a 2D mesh reduce-scatter gradients, and no more.

    ``fully_shard(model, mesh=mesh["shard"])`` needs no such call. It is for frameworks that insist
    on ``fully_shard(model, mesh=mesh)`` with the dims (replicate, shard), after which every worker
    would vote with the mean gradient of all. Call it once all modules are sharded.
    ``set_requires_all_reduce(False)`` is something else: it keeps gradients back, to accumulate.

    Args:
        model: Sharded over a mesh with a replicate dim.

    Raises:
        UnsupportedTypeError: It is not, or this torch keeps the group elsewhere.

    Notes:
        It replaces FSDP's replicate group, which torch has no public way to do, by a group of this
        rank alone. Tested with torch 2.13.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh)  # mesh has the dims "replicate" and "shard"
        >>> fully_shard(model, mesh=mesh)
        >>> disable_all_reduce(model)  # from distlion.integrations.fsdp
        >>> optimizer = distlion.DistributedLion(model.named_parameters(), lr=1e-4)
    """
    meshes = [group.mesh_info for module in model.modules() for group in _list_groups(module)]
    replicated = [mesh for mesh in meshes if hasattr(mesh, "replicate_process_group")]
    if not replicated or len(replicated) < len(meshes):
        raise UnsupportedTypeError(
            f"model is a {type(model).__name__}, {_say_why(model, meshes)}; expected "
            "fully_shard(model, mesh=mesh) with a replicate and a shard dim"
        )
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for mesh in replicated:
        mesh.replicate_process_group = alone


def _list_groups(module: nn.Module) -> list[Any]:
    """List the parameter groups of a module that ``fully_shard`` was applied to."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]


def _say_why(model: nn.Module, meshes: list[Any]) -> str:
    if meshes:
        return "parts of which are sharded over a mesh without a replicate dim, which is right"
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return f"whose groups torch {torch.__version__} keeps where they were not found"
    return "which is not sharded by FSDP2"

"""FSDP2 beside a voting optimizer: gradients are reduced within a worker, never between workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distlion.errors import UnsupportedTypeError


def disable_all_reduce(model: nn.Module) -> None:
    """Make an FSDP2 model on a 2D mesh reduce-scatter gradients, without an all-reduce.

    ``fully_shard(model, mesh=mesh["shard"])`` needs no such call. The call is for frameworks that
    insist on ``fully_shard(model, mesh=mesh)`` with the dims (replicate, shard). Without it, every
    worker would vote with the mean gradient of all. Call it once all modules are sharded.
    ``set_requires_all_reduce(False)`` is different: it holds gradients back to accumulate them.

    Args:
        model: Model sharded over a mesh with a replicate dim.

    Raises:
        UnsupportedTypeError: The model is not, or this torch keeps the group elsewhere.

    Notes:
        The call replaces FSDP's replicate group by a group of this rank alone. torch has no public
        way to do that. Tested with torch 2.13.

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
    """List the parameter groups of a module after ``fully_shard``."""
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
        return f"whose groups were not found in torch {torch.__version__}"
    return "which is not sharded by FSDP2"

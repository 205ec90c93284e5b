"""Parameters of a member of several processes: FSDP2's lane i holds shard i, or all hold all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlion.crew.lanes import Lanes
from distlion.errors import InvalidArgumentError
from distlion.step.agreement import Agreement
from distlion.step.nodes import NodePieces
from distlion.step.param import is_dtensor
from distlion.step.ranks import Ranks
from distlion.step.replicas import Replicas
from distlion.step.shard_pieces import OwnShards, ShardPieces
from distlion.step.sharding import Sharding, check_kinds

LANES_REFUSED = {
    "overlap": "votes leave during backward, before all processes know that a step begins",
    "agreement": "workers are compared after the processes have agreed on a step",
}
"""Options of an optimizer that a member of several processes cannot have yet."""


@dataclass(frozen=True)
class LaneSharding(Sharding):
    """The sharding of an optimizer's parameters over the lanes of its member.

    The mesh has no dim for the members: these are the processes of ``ranks``, which torch has no
    group of.
    """

    @property
    def worker(self) -> tuple[int, ...]:
        (mesh,) = self.voter_dims
        return tuple(mesh.mesh.flatten().tolist())

    def among(self, ranks: Ranks) -> LaneSharding:
        """Return the same sharding among the processes of an epoch."""
        return replace(self, ranks=ranks)


class LanePieces(ShardPieces):
    """The momenta of a lane; in states each is sharded like its parameter, over the lanes alone."""

    localize = OwnShards.localize
    sketch = OwnShards.localize
    export = OwnShards.export

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Return "", as a saved momentum that is cut in another way is refused."""
        return ""


def open_lanes(
    lanes: Lanes, params: Mapping[str, Tensor]
) -> tuple[LaneSharding | None, NodePieces | ShardPieces]:
    """Find each process's part of the parameters: its shards, or of whole ones pieces of momenta.

    Raises:
        UnsupportedTypeError: Some are DTensors and others are not.
        InvalidArgumentError: They lie on a mesh that is not that of the lanes.
    """
    if not any(map(is_dtensor, params.values())):
        return None, NodePieces(lanes.number, lanes.lane)
    check_kinds(params)
    expected = dist.get_process_group_ranks(lanes.group)
    meshes = dict.fromkeys(param.device_mesh for param in params.values())  # type: ignore[attr-defined]
    for mesh in meshes:
        found = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or found != expected:
            raise InvalidArgumentError(
                f"parameters lie on a mesh of the shape {tuple(mesh.mesh.shape)} with the ranks "
                f"{found}; expected a mesh of one dim with the processes of this member, "
                f"{expected}. The members of the crew take the place of a dim that replicates"
            )
    if len(meshes) > 1:
        raise InvalidArgumentError(
            "parameters lie on several meshes; make one mesh of the processes of this member, and "
            "pass it to each fully_shard()"
        )
    sharding = LaneSharding(lanes.alone, dict.fromkeys(meshes))
    return sharding, LanePieces(sharding)


def check_lane_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a member of several processes cannot have.

    Raises:
        InvalidArgumentError: There is one.
    """
    for name, reason in LANES_REFUSED.items():
        given = options.get(name)
        if given and given != Agreement():
            raise InvalidArgumentError(
                f"{name}={given!r} cannot be used where members have several processes: {reason}; "
                "leave it out"
            )
    replicas = options.get("replicas")
    if isinstance(replicas, Replicas) and replicas.on_mismatch == "repair":
        raise InvalidArgumentError(
            "on_mismatch='repair' cannot be used where members have several processes: a "
            "difference in one shard does not show which member is right in the others; use "
            "on_mismatch='raise'"
        )

"""Sharded parameters: a DTensor's ``Shard`` dims are local to a worker, and one mesh dim votes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import InvalidArgumentError, ProcessGroupError, UnsupportedTypeError
from distlion.step.param import is_dtensor
from distlion.step.ranks import Ranks, check_member
from distlion.wire.ask import ask_texts
from distlion.wire.gloo import Gloo
from distlion.wire.groups import own_group
from distlion.wire.watch import is_registered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sharding:
    """The sharding of an optimizer's parameters over the ranks of each worker.

    Attributes:
        ranks: All ranks of all workers; the ranks with one worker's shards form a row.
        voter_dims: For each mesh of parameters, the dim that votes; None where the mesh covers a
            single worker.
        state_meshes: For each of them, a mesh that also includes the voters.
    """

    ranks: Ranks
    voter_dims: Mapping[DeviceMesh, int | None]
    state_meshes: Mapping[DeviceMesh, DeviceMesh] = field(default_factory=dict)

    @property
    def worker(self) -> tuple[int, ...]:
        """The ranks of this rank's worker, by torch's numbers."""
        assert self.ranks.process_group is not None  # checked when this was made
        numbers = _ranks_of(self.ranks.process_group)
        return tuple(numbers[member] for member in self.ranks.inside)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Check that further parameters are cut over the same ranks.

        Raises:
            UnsupportedTypeError: One is a plain tensor.
            InvalidArgumentError: One lies on another mesh, or is cut over the voters.
        """
        check_kinds(params)
        for name, param in params.items():
            if param.device_mesh not in self.voter_dims:  # type: ignore[attr-defined]
                raise InvalidArgumentError(
                    f"{name} lies on a mesh that no parameter of this optimizer lay on when it was "
                    "made; make an optimizer of all parameters"
                )
            dim = self.voter_dims[param.device_mesh]  # type: ignore[attr-defined]
            if dim is not None and not param.placements[dim].is_replicate():  # type: ignore[attr-defined]
                raise InvalidArgumentError(
                    f"{name} is cut over the workers that vote; expected it to be replicated there"
                )


# By the group itself: names return with the next default group, which has other members.
_n_found: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def find_sharding(
    params: Mapping[str, Tensor], process_group: dist.ProcessGroup | None, *, timeout_s: float
) -> Sharding | None:
    """Find the ranks that hold this worker's shards, and the ranks that vote with this one.

    Every rank of every worker must call it.

    Args:
        params: An optimizer's parameters by name.
        process_group: The workers that vote, one rank of each; None for the only mesh dim over
            which all parameters are replicated.
        timeout_s: Seconds for all ranks to meet.

    Returns:
        The sharding; None where no parameter is a DTensor.

    Raises:
        UnsupportedTypeError: Some are DTensors and others are not.
        InvalidArgumentError: No mesh dim, or more than one, can vote.
        ProcessGroupError: Ranks did not come, or this one is not in ``process_group``.
    """
    if not any(map(is_dtensor, params.values())):
        return None
    check_kinds(params)
    meshes = list(dict.fromkeys(param.device_mesh for param in params.values()))  # type: ignore[attr-defined]
    replicated = _find_replicated(meshes, params.values())
    if process_group is None:
        voters = _find_voters(replicated)
    else:
        voters = check_member(process_group)
    ranks = tuple(dist.get_process_group_ranks(voters))
    voter_dims = {mesh: _find_dim(mesh, replicated[mesh], ranks) for mesh in meshes}
    worker = _list_worker(voter_dims, ranks)
    rows = _gather_rows(voters, worker, timeout_s=timeout_s)
    everybody = _group_all(sorted(itertools.chain(*rows)))
    number_of = {rank: index for index, rank in enumerate(_ranks_of(everybody))}
    placed = replace(
        Ranks.of(everybody),
        inside=tuple(number_of[rank] for rank in worker),
        between=tuple(number_of[rank] for rank in ranks),
        is_sharded=True,
    )
    state_meshes = {
        mesh: mesh if dim is not None else _add_voters(mesh, voters, timeout_s=timeout_s)
        for mesh, dim in voter_dims.items()
    }
    return Sharding(placed, voter_dims, state_meshes)


def check_kinds(params: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedTypeError if a parameter is a plain tensor, beside DTensors."""
    for name, param in params.items():
        if not is_dtensor(param):
            raise UnsupportedTypeError(
                f"{name} is a plain tensor beside DTensors: its gradient is not averaged over the "
                "ranks that hold the others' shards; shard it too (fully_shard on the module "
                "that holds it; model.reshard() after a forward pass), give it to an optimizer of "
                "its own, or leave it out if it is frozen"
            )


def _find_replicated(
    meshes: Sequence[DeviceMesh], params: Iterable[Tensor]
) -> dict[DeviceMesh, set[int]]:
    """Find the dims of each mesh over which all parameters on it are replicated."""
    found = {mesh: set(range(mesh.ndim)) for mesh in meshes}
    for param in params:
        for dim, placement in enumerate(param.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                found[param.device_mesh].discard(dim)  # type: ignore[attr-defined]
    return found


def _find_voters(replicated: Mapping[DeviceMesh, set[int]]) -> dist.ProcessGroup:
    """Find the only mesh dim over which all parameters are replicated."""
    candidates = [(mesh, dim) for mesh, dims in replicated.items() for dim in sorted(dims)]
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(dist.get_process_group_ranks(mesh.get_group(dim))): mesh.get_group(dim)
        for mesh, dim in candidates
    }
    if len(groups) != 1 or len(candidates) != len(replicated):
        which = "no mesh dim" if not groups else "more than one mesh dim"
        raise InvalidArgumentError(
            f"the parameters are DTensors, and {which} replicates all of them, so that the "
            "voters are unknown; give the workers as process_group=, for example "
            'mesh["replicate"].get_group()'
        )
    return next(iter(groups.values()))


def _find_dim(mesh: DeviceMesh, replicated: set[int], voters: tuple[int, ...]) -> int | None:
    """Find the dim of a mesh that votes; None where the mesh covers a single worker."""
    for dim in sorted(replicated):
        if tuple(dist.get_process_group_ranks(mesh.get_group(dim))) == voters:
            return dim
    shared = set(mesh.mesh.flatten().tolist()) & set(voters)
    if len(shared) > 1:
        raise InvalidArgumentError(
            f"process_group has the ranks {list(voters)}, and parameters are cut over "
            f"{sorted(shared)} of them; give the group of a mesh dim over which all parameters are "
            'replicated, for example mesh["replicate"].get_group()'
        )
    return None


def _list_worker(
    voter_dims: Mapping[DeviceMesh, int | None], voters: tuple[int, ...]
) -> tuple[int, ...]:
    """List the ranks that hold this worker's shards, which are its largest mesh."""
    rows = []
    for mesh, dim in voter_dims.items():
        ranks, coordinate = mesh.mesh, mesh.get_coordinate()
        assert coordinate is not None  # this rank holds a shard
        if dim is not None:
            ranks = ranks.select(dim, coordinate[dim])
        rows.append(tuple(ranks.flatten().tolist()))
    worker = max(rows, key=len)
    beyond = {rank for row in rows for rank in row} - set(worker)
    if beyond:
        raise InvalidArgumentError(
            f"parameters are cut over the ranks {list(worker)} and over others, {sorted(beyond)}; "
            "expected one mesh, or meshes of which one contains all"
        )
    if len(set(worker) & set(voters)) != 1:
        raise InvalidArgumentError(
            f"the ranks {sorted(set(worker) & set(voters))} hold shards of one worker and vote "
            "against each other; give one rank of each worker as process_group="
        )
    return worker


def _gather_rows(
    voters: dist.ProcessGroup, row: Sequence[int], *, timeout_s: float
) -> list[tuple[int, ...]]:
    """Gather the ranks of each worker, in the order of the voters."""
    _n_found[voters] = _n_found.get(voters, 0) + 1
    group = own_group(voters, name=f"sharding {_n_found[voters]}", timeout_s=timeout_s)
    link = Gloo(group, timeout_s=timeout_s)
    told = ask_texts(link, " ".join(map(str, row)), step=0)
    rows = [tuple(map(int, text.split())) for text in told]
    if len(set(map(len, rows))) > 1:
        raise InvalidArgumentError(
            f"workers have different numbers of ranks: {list(map(len, rows))}; expected the same "
            "mesh for each"
        )
    places = [
        ranks.index(rank)
        for ranks, rank in zip(rows, dist.get_process_group_ranks(voters), strict=True)
    ]
    if len(set(places)) > 1:
        raise InvalidArgumentError(
            f"process_group has the ranks {_ranks_of(voters)}, which are number {places} of their "
            "workers and so hold different shards. Expected ranks that hold the same shard. Give "
            'the group of a mesh dim, for example mesh["replicate"].get_group()'
        )
    return rows


def _group_all(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return torch's group of these ranks, the same one for all optimizers.

    Calls of several optimizers can be told apart only on one group.
    """
    world = dist.group.WORLD
    if world is None:
        raise ProcessGroupError("there is no process group; call init_process_group first")
    if list(ranks) == _ranks_of(world):
        return world
    group = _groups.get(tuple(ranks))
    if group is None or not is_registered(group):
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        _groups[tuple(ranks)] = group
    return group


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    return list(dist.get_process_group_ranks(group))


def _add_voters(mesh: DeviceMesh, voters: dist.ProcessGroup, *, timeout_s: float) -> DeviceMesh:
    """Return a mesh with the voters as an additional first dim."""
    from torch.distributed.device_mesh import DeviceMesh

    rows = _gather_rows(voters, mesh.mesh.flatten().tolist(), timeout_s=timeout_s)
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    whole: DeviceMesh = DeviceMesh.from_group(
        [voters, *(mesh.get_group(dim) for dim in range(mesh.ndim))],
        mesh.device_type,
        mesh=torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), *mesh.mesh.shape),
        mesh_dim_names=("voters", *names),
    )
    return whole

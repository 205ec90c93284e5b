"""Sharded parameters: a DTensor's ``Shard`` dims are local to a worker, and one mesh dim votes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import InvalidArgumentError, ProcessGroupError, UnsupportedTypeError
from distlion.exchange import Link, gather_bytes
from distlion.layout import WORD_ELEMENTS, Slot
from distlion.voting.grid import Grid, own_group
from distlion.voting.group import check_member
from distlion.voting.param import Copies, is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sharding:
    """How the parameters of an optimizer are cut over the ranks of each worker.

    Attributes:
        everybody: All ranks of all workers.
        grid: Where this one stands among them.
        voter_dims: For each mesh of parameters, the dim that votes; None where the parameters' mesh
            is that of one worker.
        state_meshes: For each of them, one that has the voters too.
    """

    everybody: dist.ProcessGroup
    grid: Grid
    voter_dims: Mapping[DeviceMesh, int | None]
    state_meshes: Mapping[DeviceMesh, DeviceMesh] = field(default_factory=dict)

    @property
    def worker(self) -> tuple[int, ...]:
        """The ranks of this rank's worker, as torch numbers them."""
        ranks = _ranks_of(self.everybody)
        return tuple(ranks[member] for member in self.grid.inside)

    @property
    def voter(self) -> int:
        """The number of this rank's worker."""
        return self.grid.between.index(dist.get_rank(self.everybody))

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Check that further parameters are cut over the same ranks.

        Raises:
            UnsupportedTypeError: One is a plain tensor.
            InvalidArgumentError: One lies on another mesh, or is cut over the voters.
        """
        _check_kinds(params)
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


_n_found: Counter[str] = Counter()


def find_sharding(
    params: Mapping[str, Tensor], process_group: dist.ProcessGroup | None, *, timeout_s: float
) -> Sharding | None:
    """Find out which ranks hold the shards of this worker, and which ones vote with this one.

    Every rank of every worker must call it.

    Args:
        params: By name, of an optimizer.
        process_group: The workers that vote, one rank of each; None for the only mesh dim over
            which all parameters are replicated.
        timeout_s: For all ranks to meet.

    Returns:
        None where no parameter is a DTensor.

    Raises:
        UnsupportedTypeError: Some are DTensors and others are not.
        InvalidArgumentError: No mesh dim, or more than one, may vote.
        ProcessGroupError: Ranks did not come, or this one is not in ``process_group``.
    """
    if not any(map(is_dtensor, params.values())):
        return None
    _check_kinds(params)
    meshes = list(dict.fromkeys(param.device_mesh for param in params.values()))  # type: ignore[attr-defined]
    if process_group is None:
        voters = _find_voters(meshes, params.values())
    else:
        voters = check_member(process_group)
    ranks = tuple(dist.get_process_group_ranks(voters))
    replicated = _find_replicated(meshes, params.values())
    voter_dims = {mesh: _find_dim(mesh, replicated[mesh], ranks) for mesh in meshes}
    worker = _list_worker(voter_dims, ranks)
    rows = _gather_rows(voters, worker, timeout_s=timeout_s)
    everybody = _group_all(sorted(itertools.chain(*rows)))
    number_of = {rank: index for index, rank in enumerate(_ranks_of(everybody))}
    grid = Grid(tuple(number_of[rank] for rank in worker), tuple(number_of[rank] for rank in ranks))
    state_meshes = {
        mesh: mesh if dim is not None else _add_voters(mesh, voters, timeout_s=timeout_s)
        for mesh, dim in voter_dims.items()
    }
    return Sharding(everybody, grid, voter_dims, state_meshes)


def _check_kinds(params: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        if not is_dtensor(param):
            raise UnsupportedTypeError(
                f"{name} is a plain tensor beside DTensors: nobody averages its gradient over the "
                "ranks that hold the shards of the others; shard it too (fully_shard on the module "
                "that holds it), or give it to an optimizer of its own"
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


def _find_voters(meshes: Sequence[DeviceMesh], params: Iterable[Tensor]) -> dist.ProcessGroup:
    """Find the only mesh dim over which all parameters are replicated."""
    found = _find_replicated(meshes, params)
    candidates = [(mesh, dim) for mesh, dims in found.items() for dim in sorted(dims)]
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(dist.get_process_group_ranks(mesh.get_group(dim))): mesh.get_group(dim)
        for mesh, dim in candidates
    }
    if len(groups) != 1 or len(candidates) != len(meshes):
        which = "no mesh dim" if not groups else "more than one mesh dim"
        raise InvalidArgumentError(
            f"the parameters are DTensors, and {which} replicates all of them, so that it is not "
            "known who votes; give the workers as process_group=, for example "
            'mesh["replicate"].get_group()'
        )
    return next(iter(groups.values()))


def _find_dim(mesh: DeviceMesh, replicated: set[int], voters: tuple[int, ...]) -> int | None:
    """Find which dim of a mesh votes; None where its ranks are those of one worker."""
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
    """List the ranks that hold shards of this worker: those of its largest mesh."""
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
    key = str(voters.group_name)
    _n_found[key] += 1
    group = own_group(voters, name=f"sharding {_n_found[key]}", timeout_s=timeout_s)
    link = Link(group, torch.device("cpu"), timeout_s=timeout_s)
    lengths = gather_bytes(link, np.int64(len(row)).tobytes(), step=0)
    longest = max(int(np.frombuffer(each, np.int64)[0]) for each in lengths)
    padded = np.full(longest, -1, np.int64)
    padded[: len(row)] = row
    rows = [np.frombuffer(each, np.int64) for each in gather_bytes(link, padded.tobytes(), step=0)]
    if any(each[-1] < 0 for each in rows):
        raise InvalidArgumentError(
            "workers have different numbers of ranks: "
            f"{[int((each >= 0).sum()) for each in rows]}; expected the same mesh for each"
        )
    return [tuple(each.tolist()) for each in rows]


def _group_all(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of these ranks that torch knows."""
    world = dist.group.WORLD
    if world is None:
        raise ProcessGroupError("there is no process group; call init_process_group first")
    if list(ranks) == _ranks_of(world):
        return world
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), backend="gloo", use_local_synchronization=True
    )
    return group


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    return list(dist.get_process_group_ranks(group))


def _add_voters(mesh: DeviceMesh, voters: dist.ProcessGroup, *, timeout_s: float) -> DeviceMesh:
    """Return a mesh whose first dim are the voters, and whose others are those of a mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    rows = _gather_rows(voters, mesh.mesh.flatten().tolist(), timeout_s=timeout_s)
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    whole: DeviceMesh = DeviceMesh.from_group(
        [voters, *(mesh.get_group(dim) for dim in range(mesh.ndim))],
        mesh.device_type,
        mesh=torch.tensor(rows).view(len(rows), *mesh.mesh.shape),
        mesh_dim_names=("voters", *names),
    )
    return whole


class ShardPieces:
    """What this process keeps of each parameter's momentum: that of its local shard.

    Args:
        sharding: How parameters are cut.
    """

    part = 0

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def cut(self, param: Tensor) -> None:
        """Do nothing: who made the DTensor has cut it."""

    def forget(self, params: Iterable[Tensor]) -> None:
        """Do nothing, as ``cut`` did."""

    def of(self, param: Tensor) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of what is kept, of the flat local shard."""
        return ((0, local_tensor(param).numel()),)

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the place of the local shard, of a parameter's.

        Where a shard is a range of the flat parameter, as along dim 0, its coins are those of the
        elements' numbers there, so that bits do not depend on the number of shards. Any other shard
        has the coins of the first so many elements.
        """
        shape, offset = _find_offset(param)
        start = 0
        if param.ndim and tuple(shape[1:]) == tuple(param.shape[1:]):
            start = min(offset[0] * math.prod(param.shape[1:]), param.numel())
        word, bit = divmod(start, WORD_ELEMENTS)
        n_elements = local_tensor(param).numel()
        return slot._replace(
            n_elements=n_elements, first_word=slot.first_word + word, first_bit=bit
        )

    def find_copies(self, param: Tensor) -> Copies:
        """Find who else in this worker holds the same shard.

        A dim that is replicated and does not vote has a copy on each of its ranks; so has a mesh
        of some ranks of the worker on each further part of these.
        """
        mesh, voter_dims = param.device_mesh, self._sharding.voter_dims  # type: ignore[attr-defined]
        inside, coordinate = self._sharding.worker, mesh.get_coordinate()
        n_shards, is_first = 1, inside[0] in mesh.mesh.flatten().tolist()
        for dim, placement in enumerate(param.placements):  # type: ignore[attr-defined]
            if dim == voter_dims[mesh]:
                continue
            if placement.is_replicate():
                is_first = is_first and coordinate[dim] == 0
            else:
                n_shards *= mesh.size(dim)
        return Copies(len(inside) // n_shards, is_first)

    def momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the shape of the local shard."""
        return local_tensor(param).shape

    def take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return what is kept here of a saved momentum: all, once ``localize`` has cut it."""
        return exp_avg

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Cut a saved momentum down to this worker's row and this rank's shard.

        Args:
            param: Whose.
            exp_avg: A DTensor or plain tensor of the shape of the parameter, or of that with the
                voters before it. Anything else is returned as it is.
        """
        if not isinstance(exp_avg, Tensor):
            return exp_avg
        n_voters, local_shape = len(self._sharding.grid.between), self.momentum_shape(param)
        stacked = torch.Size([n_voters, *param.shape])
        if is_dtensor(exp_avg):
            mesh, placements = self._state_place(param)
            if exp_avg.shape == stacked and exp_avg.device_mesh == mesh:  # type: ignore[attr-defined]
                return local_tensor(exp_avg.redistribute(mesh, placements))[0]  # type: ignore[attr-defined]
            exp_avg = exp_avg.full_tensor()  # type: ignore[attr-defined]
        if exp_avg.shape == stacked:
            exp_avg = exp_avg[self._sharding.voter]
        elif exp_avg.shape != param.shape:
            return exp_avg
        _, offset = _find_offset(param)
        for dim, size in enumerate(local_shape):
            exp_avg = exp_avg.narrow(dim, min(offset[dim], exp_avg.shape[dim] - size), size)
        return exp_avg

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum as formats that know DTensors save it: (voters, *shape)."""
        from torch.distributed.tensor import DTensor

        mesh, placements = self._state_place(param)
        whole: Tensor = DTensor.from_local(
            exp_avg.unsqueeze(0),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size([len(self._sharding.grid.between), *param.shape]),
            stride=(param.numel(), *torch.empty(param.shape, device="meta").stride()),
        )
        return whole

    def _state_place(self, param: Tensor) -> tuple[DeviceMesh, list[Any]]:
        """Return the mesh of a momentum in the form (voters, *shape), and its placements there."""
        from torch.distributed.tensor import Shard

        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        dim = self._sharding.voter_dims[mesh]
        moved = [_move_dim(placement) for placement in placements]
        if dim is None:
            return self._sharding.state_meshes[mesh], [Shard(0), *moved]
        moved[dim] = Shard(0)
        return mesh, moved


def _move_dim(placement: Any) -> Any:
    """Return a placement for a tensor that has one more dim in front."""
    if not hasattr(placement, "dim"):
        return placement
    # Tensor parallelism below FSDP has a kind of Shard of its own.
    more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + 1, **more)


def _find_offset(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the local shard, and where it begins in the parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
    )
    return tuple(shape), tuple(offset)

"""Momenta of sharded parameters: a rank's part, and the form in states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distlion.layout import WORD_ELEMENTS, Slot
from distlion.step.cut_matrices import Box
from distlion.step.param import ALONE, Copies, is_dtensor, local_tensor
from distlion.step.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OwnShards:
    """Keep the momenta of one worker's whole parameters and local shards.

    In states each momentum is sharded like its parameter, as in torch's optimizers.
    """

    part = 0
    holds_shards = True
    makes_whole = False
    """Whether other ranks' shards can be had in a step, as an orthogonalized matrix needs them."""

    def cut(self, param: Tensor) -> None:
        """Do nothing, as a DTensor is already cut."""

    def forget(self, params: Iterable[Tensor]) -> None:
        """Do nothing, as ``cut`` did."""

    def of(self, param: Tensor) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of the whole flat local shard, which is kept here."""
        return ((0, local_tensor(param).numel()),)

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the slot of the local shard; nothing here draws coins by its place."""
        return slot._replace(n_elements=local_tensor(param).numel())

    def find_copies(self, param: Tensor) -> Copies:
        """Return ``ALONE``, as nothing here takes norms over ranks."""
        return ALONE

    def momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the shape of the local shard."""
        return local_tensor(param).shape

    def take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a saved momentum unchanged, as ``localize`` has cut it already."""
        return exp_avg

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Cut a saved momentum down to this rank's shard, without other ranks.

        Args:
            param: The parameter.
            exp_avg: A DTensor that is sharded like it, or a plain tensor of its shape. Anything
                else is returned unchanged.
        """
        if _is_cut_like(param, exp_avg):
            return local_tensor(exp_avg)
        is_whole = isinstance(exp_avg, Tensor) and exp_avg.shape == param.shape
        if not is_whole or is_dtensor(exp_avg) or not is_dtensor(param):
            return exp_avg
        return _cut_shard(param, exp_avg)

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Describe how a saved momentum is sharded if that differs from the parameter's way."""
        is_sharded = is_dtensor(param) and is_dtensor(exp_avg) and exp_avg.shape == param.shape
        if not is_sharded or _is_cut_like(param, exp_avg):
            return ""
        return f"{_describe_place(exp_avg)}; the parameter has {_describe_place(param)}"

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum in its form for states: a DTensor where the parameter is one."""
        return self.wrap(param, exp_avg) if is_dtensor(param) else exp_avg

    def wrap(self, param: Tensor, shard: Tensor) -> Tensor:
        """Return a DTensor like the parameter, from this rank's shard of it."""
        from torch.distributed.tensor import DTensor

        whole: Tensor = DTensor.from_local(
            shard,
            param.device_mesh,  # type: ignore[attr-defined]
            param.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        return whole


class ShardPieces(OwnShards):
    """The momenta that this process keeps, for its worker's local shards.

    Args:
        sharding: The sharding of the parameters.
    """

    makes_whole = True

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the slot of the local shard, from the parameter's slot.

        If a shard is a range of the flat parameter, as along dim 0, elements keep their numbers and
        so their coins. Bits then do not depend on the number of shards. Any other shard takes the
        coins of the parameter's first elements.
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
        """Find the ranks of this worker that hold the same shard.

        A replicated dim that does not vote has a copy on each of its ranks. So does a mesh of some
        of the worker's ranks on each other group of them.
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

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Cut a saved momentum down to this worker's row and this rank's shard.

        If ``describe_cut`` returns text, all ranks of its mesh must call this.

        Args:
            param: The parameter.
            exp_avg: A DTensor or plain tensor of the parameter's shape, or (voters, *shape).
                Anything else is returned unchanged.
        """
        if not isinstance(exp_avg, Tensor):
            return exp_avg
        stacked = self.stacked_shape(param)
        if _is_cut_like(param, exp_avg):
            return local_tensor(exp_avg)
        if is_dtensor(exp_avg):
            mesh, placements = self._state_place(param)
            if exp_avg.shape == stacked and exp_avg.device_mesh == mesh:  # type: ignore[attr-defined]
                return local_tensor(exp_avg.redistribute(mesh, placements))[0]  # type: ignore[attr-defined]
            exp_avg = exp_avg.full_tensor()  # type: ignore[attr-defined]
        if exp_avg.shape == stacked:
            exp_avg = exp_avg[self._sharding.ranks.row]
        elif exp_avg.shape != param.shape:
            return exp_avg
        return _cut_shard(param, exp_avg)

    def sketch(self, param: Tensor, exp_avg: Any) -> Any:
        """Return a stand-in with the shape, dtype and device of the result of ``localize``.

        It asks no other rank, so that a momentum is checked before any rank waits.
        """
        if not is_dtensor(exp_avg):
            return self.localize(param, exp_avg)
        fits = exp_avg.shape in (param.shape, self.stacked_shape(param))
        shape = self.momentum_shape(param) if fits else exp_avg.shape
        return local_tensor(exp_avg).new_zeros(()).expand(shape)

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Describe the cut of a saved momentum if ``localize`` asks other ranks for it, else ""."""
        if not is_dtensor(exp_avg) or _is_cut_like(param, exp_avg):
            return ""
        if exp_avg.shape == self.stacked_shape(param):
            return _describe_place(exp_avg, *self._state_place(param))
        return _describe_place(exp_avg)

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum in the form for formats that know DTensors: (voters, *shape)."""
        from torch.distributed.tensor import DTensor

        mesh, placements = self._state_place(param)
        whole: Tensor = DTensor.from_local(
            exp_avg.unsqueeze(0),
            mesh,
            placements,
            run_check=False,
            shape=self.stacked_shape(param),
            stride=(
                param.numel(),
                *torch.empty(param.shape, dtype=param.dtype, device="meta").stride(),
            ),
        )
        return whole

    @property
    def n_workers(self) -> int:
        """Number of workers, the first dim of a tensor that differs between them."""
        return len(self._sharding.ranks.between)

    def stacked_shape(self, param: Tensor) -> torch.Size:
        """Return the shape of a tensor that differs between workers: (voters, *shape)."""
        return torch.Size([self.n_workers, *param.shape])

    def export_number(self, param: Tensor, number: Tensor) -> Tensor:
        """Return a worker's number in the form for formats that know DTensors: (voters,).

        Args:
            param: A parameter, whose mesh the result has.
            number: () any dtype.
        """
        from torch.distributed.tensor import DTensor

        mesh, placements = self._number_place(param)
        local = number.reshape(1).to(local_tensor(param).device)
        size = torch.Size([self.n_workers])
        whole: Tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=size, stride=(1,)
        )
        return whole

    def localize_number(self, param: Tensor, numbers: Tensor) -> Tensor:
        """Return this worker's number, from a DTensor or plain tensor of the shape (voters,).

        If ``describe_number`` returns text, all ranks of its mesh must call this.
        """
        if not is_dtensor(numbers):
            return numbers[self._sharding.ranks.row]
        if not self.describe_number(param, numbers):
            return local_tensor(numbers)[0]
        whole: Tensor = numbers.full_tensor()  # type: ignore[attr-defined]
        return whole[self._sharding.ranks.row]

    def describe_number(self, param: Tensor, numbers: Any) -> str:
        """Describe the cut of saved numbers as ``describe_cut`` does."""
        if not is_dtensor(numbers):
            return ""
        return _describe_place(numbers, *self._number_place(param))

    def _number_place(self, param: Tensor) -> tuple[DeviceMesh, list[Any]]:
        """Return the mesh of a number of each worker, and its placements there."""
        from torch.distributed.tensor import Replicate, Shard

        mesh, _ = self._state_place(param)
        voter_dim = self._sharding.voter_dims[param.device_mesh] or 0  # type: ignore[attr-defined]
        return mesh, [Shard(0) if dim == voter_dim else Replicate() for dim in range(mesh.ndim)]

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


def locate_shard(param: Tensor) -> Box:
    """Return the place of this rank's shard in a DTensor: (start, stop) in each dim."""
    shape, offset = _find_offset(param)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _cut_shard(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a plain tensor of the parameter's shape."""
    _, offset = _find_offset(param)
    for dim, size in enumerate(local_tensor(param).shape):
        whole = whole.narrow(dim, min(offset[dim], whole.shape[dim] - size), size)
    return whole


def _is_cut_like(param: Tensor, saved: Any) -> bool:
    """Return whether a saved tensor is cut as its parameter, so that no other rank is needed."""
    return (
        is_dtensor(saved)
        and is_dtensor(param)
        and saved.shape == param.shape
        and saved.device_mesh == param.device_mesh  # type: ignore[attr-defined]
        and tuple(saved.placements) == tuple(param.placements)  # type: ignore[attr-defined]
    )


def _describe_place(
    saved: Any, mesh: DeviceMesh | None = None, placements: Iterable[Any] = ()
) -> str:
    """Describe where a saved DTensor lies; "" if it is the given place."""
    found = saved.device_mesh
    if found == mesh and tuple(saved.placements) == tuple(placements):
        return ""
    sizes, names = tuple(found.shape), found.mesh_dim_names
    dims = sizes if names is None else dict(zip(names, sizes, strict=True))
    return f"{tuple(saved.shape)} on a mesh of {dims}, placements {saved.placements}"


def _move_dim(placement: Any) -> Any:
    """Return a placement for a tensor that has one more dim in front."""
    if not hasattr(placement, "dim"):
        return placement
    # Tensor parallelism below FSDP has its own kind of Shard.
    more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + 1, **more)


def _find_offset(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the local shard, and its offset in the parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
    )
    return tuple(shape), tuple(offset)

"""Matrices that are cut over the ranks of a worker, and orthogonalized whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from distlion.errors import DeviceError
from distlion.failures import Status
from distlion.kernels.contract import Segment
from distlion.kernels.orthogonal import (
    compute_direction,
    give_direction,
    list_batches,
    orthogonalize_batch,
)
from distlion.kernels.reference import Kernels
from distlion.layout import ChunkShape, pad_bytes
from distlion.step.inputs import StepInputs
from distlion.step.staging import bring_down, bring_up, name_failure
from distlion.wire.frame import ChunkKind, Chunks, Header
from distlion.wire.node_frames import swap_payloads
from distlion.wire.transport import Transport
from distlion.wire.verdict import find_errors, with_error

Box = tuple[tuple[int, int], ...]
"""(start, stop) of a piece in each dim."""


@dataclass(frozen=True)
class CutMatrix:
    """A matrix of which each rank of a worker holds a piece.

    Attributes:
        position: Number of its parameter among the trainable ones.
        matrix: (rows, columns).
        shape: The shape that pieces are boxes of: the parameter's, or (n,) for flat pieces.
        boxes: The piece of each rank; ranks may hold the same one.
        dtype: The dtype in which pieces travel, equal on all ranks: no narrower than products.
    """

    position: int
    matrix: tuple[int, int]
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dtype: torch.dtype

    def count(self, rank: int) -> int:
        """Count the elements of a rank's piece."""
        return math.prod(stop - start for start, stop in self.boxes[rank])

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's piece of the whole, which has this ``shape``, as a view."""
        return whole[tuple(slice(*ends) for ends in self.boxes[rank])]


@dataclass(frozen=True)
class CutMatrices:
    """The cut matrices of one bucket, each of which one rank of the worker orthogonalizes.

    Attributes:
        link: The link between the ranks of the worker.
        device: The device of the parameters.
        kernels: The arithmetic there.
        matrices: The matrices, one or more, in the order of the bucket.
    """

    link: Transport
    device: torch.device
    kernels: Kernels
    matrices: tuple[CutMatrix, ...]

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the matrices that it orthogonalizes, by their numbers here.

        The most expensive ones come first, each for the rank that has the least to do by then.
        """
        costs = [min(each.matrix) * math.prod(each.matrix) for each in self.matrices]
        loads = [0] * self.link.n_members
        found: list[list[int]] = [[] for _ in loads]
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owner = loads.index(min(loads))
            loads[owner] += costs[number]
            found[owner].append(number)
        return tuple(map(tuple, found))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which pieces travel, which a bucket's matrices share."""
        return self.matrices[0].dtype

    @cached_property
    def shape(self) -> ChunkShape:
        """Sizes of a chunk: the largest one's, as all are padded to it."""
        most = max(
            sum(self.matrices[number].count(rank) for number in numbers)
            for numbers in self.owned
            for rank in self._ranks
        )
        return ChunkShape(len(self.matrices), pad_bytes(most * self.dtype.itemsize))

    def orthogonalize(
        self, segments: Mapping[int, Segment], header: Header, inputs: StepInputs | None
    ) -> tuple[dict[int, Segment | None], Header]:
        """Orthogonalize whole matrices: 1 read directions, 2 send, 3 orthogonalize, 4 send back.

        All ranks of the worker call it, in the same order.

        Args:
            segments: This rank's segments, by the position of their parameters.
            header: Its header, with errors found so far.
            inputs: The inputs of the step; None where this rank cannot vote.

        Returns:
            For each matrix of which there is a segment, the one to encode in its place. None where
            some rank has no gradient for its piece, so that the worker abstains. And the header,
            with the worst error found on any rank, after which there are no segments.
        """
        # 1 read directions
        pieces: dict[int, Tensor] = {}
        if inputs is not None and header.status is Status.OK:
            try:
                pieces, header = self._read(segments, header, inputs)
            except DeviceError:
                raise
            except Exception as error:  # noqa: BLE001
                header = inputs.refuse(header, error)
        present = self._list_present(pieces, can_vote=inputs is not None)

        # 2 send
        me = self.link.rank
        rows = (self._join(pieces, numbers, me) for numbers in self.owned)
        header, sent = self._swap(rows, present, header)

        # 3 orthogonalize
        voted, whole = sent.present.bool().all(0).tolist(), {}
        if inputs is not None and header.status is Status.OK:
            try:
                whole = self._orthogonalize(sent.payloads, voted)
            except DeviceError:
                raise
            except Exception as error:  # noqa: BLE001
                header = inputs.refuse(header, error)

        # 4 send back
        rows = (self._join(self._cut(whole, rank), self.owned[me], rank) for rank in self._ranks)
        header, returned = self._swap(rows, present, header)
        if header.status is not Status.OK:
            return {}, header
        return self._give(segments, returned.payloads, voted), header

    @property
    def _ranks(self) -> range:
        return range(self.link.n_members)

    def _read(
        self, segments: Mapping[int, Segment], header: Header, inputs: StepInputs
    ) -> tuple[dict[int, Tensor], Header]:
        """Read the directions of this rank's pieces into host memory, and report odd ones."""
        found: dict[int, Tensor] = {}
        with self._name_failure("directions of matrices were computed"):
            for number, matrix in enumerate(self.matrices):
                segment = segments.get(matrix.position)
                if segment is None or segment.grad is None or not matrix.count(self.link.rank):
                    continue
                found[number] = compute_direction(self.kernels, segment).to(self.dtype)
            pieces = dict(zip(found, bring_down(list(found.values())), strict=True))
        # One that is not finite is NaN everywhere.
        spoiled = [number for number, piece in pieces.items() if piece[0].isnan()]
        if spoiled and inputs.nonfinite != "abstain":
            position = self.matrices[spoiled[0]].position
            header = with_error(header, Status.NON_FINITE, culprit=inputs.rank, position=position)
        return pieces, header

    def _list_present(self, pieces: Mapping[int, Tensor], *, can_vote: bool) -> Tensor:
        """Return for each matrix whether this rank has all of its piece, which may be empty."""
        flags = [
            can_vote and (number in pieces or not matrix.count(self.link.rank))
            for number, matrix in enumerate(self.matrices)
        ]
        return torch.tensor(flags, dtype=torch.bool, device="cpu")

    def _swap(
        self, rows: Iterable[Tensor], present: Tensor, header: Header
    ) -> tuple[Header, Chunks]:
        kind = replace(header, kind=ChunkKind.DIRECTION)
        read = swap_payloads(self.link, self.shape, kind, present, rows)
        return find_errors(read, header, self.link.ranks), read

    def _orthogonalize(self, payloads: Tensor, voted: Sequence[bool]) -> dict[int, Tensor]:
        """Orthogonalize the matrices of this rank, from all ranks' pieces, into host memory."""
        mine = self.owned[self.link.rank]
        rows = [self._split(payloads[rank], mine, rank) for rank in self._ranks]
        numbers = [number for number in mine if voted[number]]
        whole: dict[int, Tensor] = {}
        with self._name_failure("matrices were orthogonalized"):
            for batch in list_batches(
                [self.matrices[each].matrix for each in numbers], self.device
            ):
                chosen = [numbers[each] for each in batch]
                joined = [self._assemble(number, rows) for number in chosen]
                directions = [bring_up(each, self.device) for each in joined]
                found = orthogonalize_batch(directions, self.matrices[chosen[0]].matrix)
                whole.update(zip(chosen, bring_down(found), strict=True))
        return whole

    def _assemble(self, number: int, rows: Sequence[Mapping[int, Tensor]]) -> Tensor:
        """Put the pieces of a matrix together."""
        matrix = self.matrices[number]
        whole = torch.empty(matrix.shape, dtype=self.dtype, device="cpu")
        for rank, row in enumerate(rows):
            piece = matrix.piece(whole, rank)
            piece.copy_(row[number].view(piece.shape))
        return whole

    def _cut(self, whole: Mapping[int, Tensor], rank: int) -> dict[int, Tensor]:
        """Cut a rank's pieces out of matrices."""
        return {
            number: self.matrices[number].piece(each.reshape(self.matrices[number].shape), rank)
            for number, each in whole.items()
        }

    def _give(
        self, segments: Mapping[int, Segment], payloads: Tensor, voted: Sequence[bool]
    ) -> dict[int, Segment | None]:
        """Make the segments to encode, from this rank's pieces of orthogonalized matrices."""
        given: dict[int, Segment | None] = {}
        for owner, numbers in enumerate(self.owned):
            for number, piece in self._split(payloads[owner], numbers, self.link.rank).items():
                position = self.matrices[number].position
                segment = segments.get(position)
                if segment is not None:
                    has_vote = voted[number] and segment.grad is not None
                    there = bring_up(piece, self.device)
                    given[position] = give_direction(segment, there) if has_vote else None
        return given

    def _join(self, pieces: Mapping[int, Tensor], numbers: Sequence[int], rank: int) -> Tensor:
        """Join a rank's pieces of some matrices into a payload; zeros for absent ones."""
        n_elements = self.shape.payload_bytes // self.dtype.itemsize
        row = torch.zeros(n_elements, dtype=self.dtype, device="cpu")
        for number, place in self._split(row.view(torch.uint8), numbers, rank).items():
            if number in pieces:
                place.copy_(pieces[number].reshape(-1))
        return row.view(torch.uint8)

    def _split(self, payload: Tensor, numbers: Sequence[int], rank: int) -> dict[int, Tensor]:
        """Split a payload into a rank's pieces of some matrices, as views."""
        sizes = [self.matrices[number].count(rank) for number in numbers]
        pieces = torch.split(payload.view(self.dtype)[: sum(sizes)], sizes)
        return dict(zip(numbers, pieces, strict=True))

    def _name_failure(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.device.type == "cpu" else name_failure(self.device, what)

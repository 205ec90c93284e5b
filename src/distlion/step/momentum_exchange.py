"""Momenta on the wire: their rows, the mean at the owner, and the reply to each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.kernels.contract import Kernels, Segment
from distlion.layout import FLOAT_BYTES, SCALE_ELEMENTS, BucketShape, shape_momenta
from distlion.step.momentum_sync import MomentumSync
from distlion.step.param import VotingParam
from distlion.wire.frame import Header
from distlion.wire.pattern import Ballot, Exchange, Exchanging, Reply
from distlion.wire.transport import Transport

_LARGEST = 127.0


class MomentumSlice(NamedTuple):
    """A range of elements of one parameter's momentum."""

    position: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a flat view of these elements of a parameter, or of a tensor of its shape."""
        return tensor.view(-1)[self.start : self.stop]


@dataclass(frozen=True)
class MomentumRows:
    """The momenta that one exchange moves, and their format: every worker sends one row.

    Attributes:
        slices: The slices of the row, in order.
        dtype: Dtype on the wire: float32, bfloat16 or int8.
        n_workers: Number of workers, each the owner of a shard of the row.
    """

    slices: tuple[MomentumSlice, ...]
    dtype: torch.dtype
    n_workers: int

    @property
    def n_elements(self) -> int:
        """Number of elements that are averaged."""
        return sum(part.stop - part.start for part in self.slices)

    @property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return shape_momenta(self.n_elements, self.n_workers, self.dtype)

    @property
    def up_bits(self) -> float:
        """Bits that each worker sends for its elements, scales included."""
        scale_bytes = FLOAT_BYTES / SCALE_ELEMENTS if self.dtype is torch.int8 else 0
        return self.n_elements * 8 * (self.dtype.itemsize + scale_bytes)

    @property
    def down_bits(self) -> int:
        """Bits of their means, which each worker receives."""
        return self.n_elements * 8 * FLOAT_BYTES

    @property
    def shard_elements(self) -> int:
        """Elements of a shard, padding included."""
        return self.shape.reply_bytes // 4

    def join(self, momenta: Sequence[Tensor]) -> Tensor:
        """Join slices of momenta into (n_workers, shard_elements) float32, padded with 0."""
        row = torch.cat([momentum.view(-1).float() for momentum in momenta])
        n_padded = self.n_workers * self.shard_elements
        padded = torch.nn.functional.pad(row, (0, n_padded - row.numel()))
        return padded.view(self.n_workers, -1)

    def encode(self, row: Tensor) -> Tensor:
        """Encode a row: (n_workers, shard_elements) float32 to (n_workers, vote_bytes) uint8.

        Equation:
            int8: q = round(m / s), s = max |m| / 127 over 256 elements in float32; s = 0 sends 0
        """
        if self.dtype is not torch.int8:
            return row.to(self.dtype).view(torch.uint8)
        blocks = row.view(self.n_workers, -1, SCALE_ELEMENTS)
        scales = blocks.abs().amax(-1, keepdim=True) / row.new_tensor(_LARGEST)
        levels = torch.where(scales > 0, blocks / scales, 0.0).round().clamp(-_LARGEST, _LARGEST)
        encoded = torch.cat(
            [
                levels.to(torch.int8).view(self.n_workers, -1).view(torch.uint8),
                scales.view(self.n_workers, -1).view(torch.uint8),
            ],
            dim=1,
        )
        padding = self.shape.vote_bytes - encoded.shape[1]
        return torch.nn.functional.pad(encoded, (0, padding))

    def decode(self, encoded: Tensor) -> Tensor:
        """Invert ``encode``: (..., vote_bytes) uint8 to (..., shard_elements) float32."""
        if self.dtype is not torch.int8:
            return encoded.view(self.dtype).float()
        n = self.shard_elements
        levels = encoded[..., :n].contiguous().view(torch.int8).float()
        scale_bytes = 4 * n // SCALE_ELEMENTS
        scales = encoded[..., n : n + scale_bytes].contiguous().view(torch.float32)
        blocks = levels.view(*levels.shape[:-1], -1, SCALE_ELEMENTS) * scales[..., None]
        return blocks.view(levels.shape)

    @property
    def parts(self) -> None:
        """None, as momenta are floats, which are added in rank order and not in parts."""
        return None

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        """Average the workers' rows, added in float32 in rank order; the pattern's reducer.

        The mean is returned in float32 whatever the dtype: coarser rounding would change the mean,
        and with it the direction of global Lion.
        """
        rows = self.decode(votes.contiguous().view(len(votes), -1, self.shape.vote_bytes))
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        # By a tensor: for a number, some backends multiply by the reciprocal.
        return total.div_(total.new_tensor(len(rows))).view(-1).view(torch.uint8)

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Count the workers that sent each part."""
        return present.sum(0)

    def settle(self, row: Tensor, reply: Tensor) -> list[tuple[MomentumSlice, Tensor]]:
        """Return each slice with a worker's averaged momentum, flat float32.

        Args:
            row: The result of ``join``.
            reply: (n_workers, reply_bytes) uint8.
        """
        mean = reply.reshape(-1).view(torch.float32).view_as(row)
        if self.dtype is not torch.float32:
            mean = row + (mean - self.decode(self.encode(row)))
        sizes = [part.stop - part.start for part in self.slices]
        parts = torch.split(mean.view(-1)[: self.n_elements], sizes)
        return [(part, parts[index]) for index, part in enumerate(self.slices)]

    def exchange(
        self, link: Transport, pattern: Exchange, header: Header, row: Tensor
    ) -> Exchanging[Reply]:
        """Send this worker's row and return the mean."""
        ballot = Ballot(
            replace(header, sender=link.rank),
            self.encode(row),
            torch.ones(1, dtype=torch.bool, device="cpu"),
        )
        return pattern.exchange(link, self.shape, ballot, self)


def cut_slices(
    sync: MomentumSync, step: int, selected: Sequence[VotingParam]
) -> tuple[MomentumSlice, ...]:
    """Cut the slices that a step averages out of the selected parameters.

    Args:
        sync: The settings of the averages.
        step: Number of the step, counted from 0.
        selected: The parameters that are averaged.
    """
    first, last = sync.part(step, sum(param.n_kept for param in selected))
    slices = []
    start = 0
    for param in selected:
        stop = start + param.n_kept
        low, high = max(first, start), min(last, stop)
        if low < high:
            slices.append(MomentumSlice(param.position, low - start, high - start))
        start = stop
    return tuple(slices)


def new_momentum(segment: Segment, index: slice | Tensor, kernels: Kernels) -> Tensor:
    """Compute some elements of a momentum as a commit will write them, without changing anything.

    Args:
        segment: The parameter; without a gradient its momentum stays.
        index: Index into the flat parameter.
        kernels: The arithmetic.
    """
    moved = segment.exp_avg.view(-1)[index].clone()
    if segment.grad is not None:
        slot = segment.slot._replace(n_elements=moved.numel())
        param, grad = segment.param.view(-1)[index], segment.grad.view(-1)[index]
        kernels.update_momentum([Segment(slot, param, grad, moved, segment.coefficients)], [1])
    return moved

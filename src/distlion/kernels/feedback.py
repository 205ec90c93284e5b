"""Votes with scales and error feedback, on the part not transmitted yet, in plain torch.

The reference takes its ops from here; a backend may have faster ones.

Notation:
    c   direction of an element, as in ``contract.py``
    h   its estimate: what the worker's votes have said of c so far, float32
    q   what a vote says of the rest, c - h; afterwards the estimate is fl(h + q)
    e   residual: what votes have left out of c so far, float32, in place of -h

Every sum of many elements is a tree of fixed shape, in double, and all else is done element by
element. So all backends and devices return equal bits here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import FLOAT32_MAX, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.words import (
    coin_bits,
    cut_blocks,
    cut_runs,
    draw_words,
    interleave,
    pack,
    split_planes,
    sum_by_halving,
    unpack,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot

FLOAT_PLANES = 32
"""Planes of packed float32 values, a block's values one after the other."""
LOTS = 1 << 16
"""Number of values that a lot may have."""


class EncodeDirections(Protocol):
    """A backend's op ``encode_directions``."""

    def __call__(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor: ...


class SumDirections(Protocol):
    """A backend's op ``sum_directions``."""

    def __call__(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None: ...


def encode_rests_by(
    encode_directions: EncodeDirections,
    segments: Sequence[Segment],
    estimates: Sequence[Tensor] | None,
    zero: Coin,
    *,
    out: Tensor,
    scales: Tensor,
    are_residuals: bool,
) -> Tensor:
    """Implement ``contract.Kernels.encode_rests``, with directions from a backend's own op."""
    n_planes = out.shape[1]
    values, finite = _read_directions(encode_directions, segments, out)
    planes = out.new_zeros(n_planes, out.shape[0] * BLOCK_WORDS)
    scales.zero_()
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        rest = values[_elements(slot)]
        if estimates is not None:
            kept = estimates[index].view(-1)
            rest = rest + kept if are_residuals else rest - kept
        sizes = rest.abs()
        mean = tree_mean(sizes, slot.n_elements)
        words = [pack(rest > 0) | (pack(rest == 0) & coin_bits(zero, slot, device=out.device))]
        found = [mean]
        if n_planes > 1:
            is_large = sizes >= mean
            words.append(pack(is_large))
            found = [_mean_of(sizes, ~is_large), _mean_of(sizes, is_large)]
        # Not a branch, which would wait for the device. Estimates may be so far off that c - h #
        # exceeds the range of a float, even for a finite c.
        is_finite = finite[index] & mean.isfinite()
        finite[index] = is_finite
        for plane, row in enumerate(words):
            planes[plane, _words(slot)] = row.masked_fill(~is_finite, 0)
        scales[index] = torch.stack(found).masked_fill(~is_finite, 0.0)
    interleave(planes, out)
    return finite


def encode_lots_by(
    encode_directions: EncodeDirections,
    segments: Sequence[Segment],
    lot: Coin,
    *,
    out: Tensor,
    scales: Tensor,
    reach: Sequence[float],
    spread: float | None,
) -> Tensor:
    """Implement ``contract.Kernels.encode_lots``, as ``encode_rests_by``."""
    values, finite = _read_directions(encode_directions, segments, out)
    planes = out.new_zeros(1, out.shape[0] * BLOCK_WORDS)
    scales.zero_()
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        directions = values[_elements(slot)]
        sizes = directions.abs()
        mean, most = tree_mean(sizes, slot.n_elements), sizes.max()
        if reach:
            most = torch.full_like(mean, reach[index])
        elif spread is not None:
            most = mean * spread
        ratio = ((LOTS // 2) / most.double()).clamp(max=FLOAT32_MAX).float()
        ratio = ratio.masked_fill(most == 0, 0.0)
        level = (directions * ratio).floor().clamp(-(LOTS // 2), LOTS // 2).int() + LOTS // 2
        bits = pack(draw_lots(lot, slot, device=out.device) < level)
        planes[0, _words(slot)] = bits.masked_fill(~finite[index], 0)
        scales[index, 0] = mean.masked_fill(~finite[index], 0.0)
    interleave(planes, out)
    return finite


def draw_lots(lot: Coin, slot: Slot, *, device: torch.device) -> Tensor:
    """Draw a number from 0 to 65,535 for each element of a slot: (n,) int32."""
    first, skipped = divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)
    n_words = -(-(skipped + slot.n_elements) // 4)
    lanes = draw_words(lot, first, n_words, device=device).view(torch.int16)
    return (lanes[skipped : skipped + slot.n_elements].int() + LOTS) % LOTS


def move_residuals_by(
    encode_directions: EncodeDirections,
    segments: Sequence[Segment],
    residuals: Sequence[Tensor],
    votes: Tensor,
    scales: Tensor,
    finite: Tensor,
) -> None:
    """Implement ``contract.Kernels.move_residuals``, as ``encode_rests_by``."""
    values, _ = _read_directions(encode_directions, segments, votes)
    planes = split_planes(votes)
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        residual = residuals[index].view(-1)
        steps = _read_steps(planes[:, _words(slot)], slot.n_elements, scales[index])
        after = values[_elements(slot)] - (steps - residual)
        residual.copy_(torch.where(finite[index], after, residual))


def add_steps(
    estimates: Sequence[Tensor],
    slots: Sequence[Slot],
    present: Sequence[bool],
    votes: Tensor,
    scales: Tensor,
) -> None:
    """Implement ``counting.CountingKernels.add_steps``."""
    planes = split_planes(votes)
    for index, estimate in enumerate(estimates):
        slot = slots[index]
        if present[index] and slot.n_elements:
            steps = _read_steps(planes[:, _words(slot)], slot.n_elements, scales[index])
            estimate.add_(steps.view(estimate.shape))


def add_steps_of_all(estimates: Tensor, votes: BlockVotes, scales: Tensor) -> None:
    """Implement ``counting.CountingKernels.add_steps_of_all``."""
    packed, present, bucket, first_block = votes
    planes = split_planes(packed)
    for index, slot in enumerate(bucket.slots):
        alone, is_present = replace(bucket, slots=(slot,)), present[:, index : index + 1]
        # Read on the host, where they are: the voters of a run are on the device.
        voters = is_present.flatten().nonzero().flatten().tolist()
        for run in cut_runs(alone, is_present, first_block, packed.shape[1], device=packed.device):
            start = run.words.start * WORD_ELEMENTS
            for worker in voters:
                estimates[worker, start : start + run.n_elements] += _read_steps(
                    planes[worker, :, run.words], run.n_elements, scales[worker, index]
                )


def count_steps_by(
    sum_directions: SumDirections,
    votes: BlockVotes,
    scales: Tensor,
    tie: Coin,
    *,
    weights: Sequence[int],
    estimates: Tensor | None,
    out: Tensor,
    sums: Tensor,
) -> None:
    """Implement ``counting.CountingKernels.count_steps``, with a backend's own sums."""
    packed, present, bucket, first_block = votes
    n_elements = packed.shape[1] * BLOCK_WORDS * WORD_ELEMENTS
    total = torch.zeros(1, n_elements, dtype=torch.float32, device=packed.device)
    for worker, weight in enumerate(weights):
        own = slice(worker, worker + 1)
        after = torch.zeros_like(total) if estimates is None else estimates[own].clone()
        one = votes._replace(packed=packed[own], present=present[own])
        add_steps_of_all(after, one, scales[own])
        total += after if weight == 1 else after * weight
    summed = total.view(-1).view(torch.int64).view(1, packed.shape[1], FLOAT_PLANES, BLOCK_WORDS)
    anybody = present.any(0, keepdim=True)
    count_estimates(sum_directions, votes._replace(packed=summed, present=anybody), tie, out=out)
    sums.zero_()
    first_shard = first_block // max(1, bucket.shard_blocks)
    for row in range(len(sums)):
        for index, slot in bucket.cuts[first_shard + row]:
            start = (slot.bucket_word - first_block * BLOCK_WORDS) * WORD_ELEMENTS
            sums[row, index] = tree_sum(total[0, start : start + slot.n_elements].abs())


class PlainFeedback(ABC):
    """The ops of votes with scales and error feedback, for a backend without its own."""

    @abstractmethod
    def encode_directions(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor: ...

    @abstractmethod
    def sum_directions(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None: ...

    def encode_rests(
        self,
        segments: Sequence[Segment],
        estimates: Sequence[Tensor] | None,
        zero: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        are_residuals: bool = False,
    ) -> Tensor:
        directions, read = self.encode_directions, (segments, estimates, zero)
        return encode_rests_by(
            directions, *read, out=out, scales=scales, are_residuals=are_residuals
        )

    def encode_lots(
        self,
        segments: Sequence[Segment],
        lot: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        reach: Sequence[float] = (),
        spread: float | None = None,
    ) -> Tensor:
        return encode_lots_by(
            self.encode_directions,
            segments,
            lot,
            out=out,
            scales=scales,
            reach=reach,
            spread=spread,
        )

    def move_residuals(
        self,
        segments: Sequence[Segment],
        residuals: Sequence[Tensor],
        votes: Tensor,
        scales: Tensor,
        finite: Tensor,
    ) -> None:
        move_residuals_by(self.encode_directions, segments, residuals, votes, scales, finite)

    def add_steps(
        self,
        estimates: Sequence[Tensor],
        slots: Sequence[Slot],
        present: Sequence[bool],
        votes: Tensor,
        scales: Tensor,
    ) -> None:
        add_steps(estimates, slots, present, votes, scales)

    def add_steps_of_all(self, estimates: Tensor, votes: BlockVotes, scales: Tensor) -> None:
        add_steps_of_all(estimates, votes, scales)

    def count_steps(
        self,
        votes: BlockVotes,
        scales: Tensor,
        tie: Coin,
        *,
        weights: Sequence[int],
        estimates: Tensor | None,
        out: Tensor,
        sums: Tensor,
    ) -> None:
        given = (self.sum_directions, votes, scales, tie)
        count_steps_by(*given, weights=weights, estimates=estimates, out=out, sums=sums)


def count_estimates(
    sum_directions: SumDirections, estimates: BlockVotes, tie: Coin, *, out: Tensor
) -> None:
    """Take the sign of the sum of all workers' estimates, the tie coin's where it is 0.

    Args:
        sum_directions: A backend's op, which sums in float32 and in rank order.
        estimates: Votes of 32 planes, whose bytes are 512 values of each block. An absent worker's
            estimate still counts; for a parameter without votes, all bits are 0.
        tie: The coin.
        out: (blocks, 1, 8) int64. Overwritten.
    """
    packed, present, bucket, first_block = estimates
    voted = present.any(0, keepdim=True)
    everybody = voted.expand(len(packed), -1).contiguous()
    signs = out.new_empty(out.shape[0], 2, BLOCK_WORDS)
    sum_directions(estimates._replace(present=everybody), dtype=torch.float32, out=signs)
    sign, is_not_zero = split_planes(signs)
    for run in cut_runs(bucket, voted, first_block, out.shape[0], device=out.device):
        used = pack(torch.ones(run.n_elements, dtype=torch.uint8, device=out.device))
        ties = coin_bits(tie, run, device=out.device) & ~is_not_zero[run.words] & used
        sign[run.words] |= ties
    interleave(sign.view(1, -1), out)


def _read_steps(planes: Tensor, n_elements: int, scales: Tensor) -> Tensor:
    """Read q of each element of one parameter, (n,) float32, from (planes, words)."""
    bits = unpack(planes, n_elements)
    sizes = scales[0] if len(bits) == 1 else torch.where(bits[1] != 0, scales[1], scales[0])
    return torch.where(bits[0] != 0, sizes, -sizes)


def _mean_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen sizes; 0 for none."""
    return tree_mean(sizes.masked_fill(~chosen, 0.0), chosen.sum().clamp(min=1))


def tree_sum(sizes: Tensor) -> Tensor:
    """Add (n,) float32 in double, by halving; () float64."""
    sums = sizes.double()
    while sums.numel() > 1:
        sums = sum_by_halving(cut_blocks(sums))
    return sums[0]


def tree_mean(sizes: Tensor, count: int | Tensor) -> Tensor:
    """Add (n,) float32 in double, by halving; divide by ``count``; () float32."""
    return (tree_sum(sizes) / count).float()


def _read_directions(
    encode_directions: EncodeDirections, segments: Sequence[Segment], packed: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the directions of a bucket; zeros where one is not finite.

    Returns:
        (512 blocks,) float32, of as many blocks as ``packed`` has; and the op's flags.
    """
    directions = packed.new_empty(packed.shape[0], FLOAT_PLANES, BLOCK_WORDS)
    finite = encode_directions(segments, dtype=torch.float32, out=directions)
    return directions.view(-1).view(torch.float32), finite


def _words(slot: Slot) -> slice:
    return slice(slot.bucket_word, slot.bucket_word + slot.n_words)


def _elements(slot: Slot) -> slice:
    start = slot.bucket_word * WORD_ELEMENTS
    return slice(start, start + slot.n_elements)

"""Votes with error feedback, on the part not transmitted yet. Plain torch, on any device.

The reference takes its ops from here; a backend may have faster ones.

Notation:
    c   direction of an element, as in ``contract.py``
    h   its estimate: what the worker's votes have said of c so far, float32
    q   what a vote says of the rest, c - h; afterwards the estimate is fl(h + q)

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
from distlion.kernels.contract import Kernels, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.words import (
    coin_bits,
    cut_blocks,
    cut_runs,
    interleave,
    pack,
    split_planes,
    sum_by_halving,
    unpack,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot

FLOAT_PLANES = 32
"""Planes of packed float32 values, a block's values one after the other."""


class EncodeDirections(Protocol):
    """A backend's op ``encode_directions``."""

    def __call__(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor: ...


def encode_rests_by(
    encode_directions: EncodeDirections,
    segments: Sequence[Segment],
    estimates: Sequence[Tensor],
    zero: Coin,
    *,
    out: Tensor,
    scales: Tensor,
) -> Tensor:
    """Implement ``contract.Kernels.encode_rests``, with directions from a backend's own op."""
    n_planes = out.shape[1]
    directions = out.new_empty(out.shape[0], FLOAT_PLANES, BLOCK_WORDS)
    finite = encode_directions(segments, dtype=torch.float32, out=directions)
    values = directions.view(-1).view(torch.float32)
    planes = out.new_zeros(n_planes, out.shape[0] * BLOCK_WORDS)
    scales.zero_()
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        rest = values[_elements(slot)] - estimates[index].view(-1)
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


def add_steps(
    estimates: Sequence[Tensor],
    slots: Sequence[Slot],
    present: Sequence[bool],
    votes: Tensor,
    scales: Tensor,
) -> list[Tensor]:
    """Implement ``counting.CountingKernels.add_steps``."""
    planes, after = split_planes(votes), list(estimates)
    for index, estimate in enumerate(estimates):
        slot = slots[index]
        if present[index] and slot.n_elements:
            steps = _read_steps(planes[:, _words(slot)], slot.n_elements, scales[index])
            after[index] = estimate + steps.view(estimate.shape)
    return after


def add_steps_of_all(estimates: Tensor, votes: BlockVotes, scales: Tensor, *, out: Tensor) -> None:
    """Implement ``counting.CountingKernels.add_steps_of_all``."""
    packed, present, bucket, first_block = votes
    planes, after = split_planes(packed), out.copy_(estimates)
    for index, slot in enumerate(bucket.slots):
        alone, is_present = replace(bucket, slots=(slot,)), present[:, index : index + 1]
        # Read on the host, where they are: the voters of a run are on the device.
        voters = is_present.flatten().nonzero().flatten().tolist()
        for run in cut_runs(alone, is_present, first_block, packed.shape[1], device=packed.device):
            start = run.words.start * WORD_ELEMENTS
            for worker in voters:
                after[worker, start : start + run.n_elements] += _read_steps(
                    planes[worker, :, run.words], run.n_elements, scales[worker, index]
                )


class PlainFeedback(ABC):
    """The ops of votes with error feedback, for a backend without its own."""

    @abstractmethod
    def encode_directions(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor: ...

    def encode_rests(
        self,
        segments: Sequence[Segment],
        estimates: Sequence[Tensor],
        zero: Coin,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        return encode_rests_by(
            self.encode_directions, segments, estimates, zero, out=out, scales=scales
        )

    def add_steps(
        self,
        estimates: Sequence[Tensor],
        slots: Sequence[Slot],
        present: Sequence[bool],
        votes: Tensor,
        scales: Tensor,
    ) -> list[Tensor]:
        return add_steps(estimates, slots, present, votes, scales)

    def add_steps_of_all(
        self, estimates: Tensor, votes: BlockVotes, scales: Tensor, *, out: Tensor
    ) -> None:
        add_steps_of_all(estimates, votes, scales, out=out)


def count_estimates(kernels: Kernels, estimates: BlockVotes, tie: Coin, *, out: Tensor) -> None:
    """Take the sign of the sum of all workers' estimates, the tie coin's where it is 0.

    Args:
        kernels: The arithmetic of sums, in float32 and in rank order.
        estimates: Votes of 32 planes, whose bytes are 512 values of each block. An absent worker's
            estimate still counts; for a parameter without votes, all bits are 0.
        tie: The coin.
        out: (blocks, 1, 8) int64. Overwritten.
    """
    packed, present, bucket, first_block = estimates
    voted = present.any(0, keepdim=True)
    everybody = voted.expand(len(packed), -1).contiguous()
    signs = out.new_empty(out.shape[0], 2, BLOCK_WORDS)
    kernels.sum_directions(estimates._replace(present=everybody), dtype=torch.float32, out=signs)
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


def tree_mean(sizes: Tensor, count: int | Tensor) -> Tensor:
    """Add (n,) float32 in double, by halving; divide by ``count``; () float32."""
    sums = sizes.double()
    while sums.numel() > 1:
        sums = sum_by_halving(cut_blocks(sums))
    return (sums[0] / count).float()


def _words(slot: Slot) -> slice:
    return slice(slot.bucket_word, slot.bucket_word + slot.n_words)


def _elements(slot: Slot) -> slice:
    start = slot.bucket_word * WORD_ELEMENTS
    return slice(start, start + slot.n_elements)

"""Votes with error feedback: on what others do not know yet. Plain torch around the other ops.

Notation:
    c   direction of an element, as in ``contract.py``
    h   its estimate: what the worker's votes have said of c so far, float32
    q   what a vote says of the rest, c - h; afterwards the estimate is fl(h + q)

Every sum of many elements is a tree of fixed shape, in double, and all else is done element by
element, so that all backends and devices return equal bits here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import Kernels, Segment
from distlion.kernels.reference import coin_bits
from distlion.kernels.words import (
    cut_blocks,
    cut_runs,
    interleave,
    pack,
    split_planes,
    sum_by_halving,
    unpack,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket, Slot

FLOAT_PLANES = 32
"""Planes of packed float32 values: those of a block, one after the other."""


def encode_rests(
    kernels: Kernels,
    segments: Sequence[Segment],
    estimates: Sequence[Tensor],
    zero: Coin,
    *,
    out: Tensor,
    scales: Tensor,
) -> Tensor:
    """Encode what estimates lack of directions.

    Equation:
        d = fl(c - h);  the sign bit is 1 if d > 0, 0 if d < 0, and the zero coin's if d = 0
        one bit   scale: a = mean |d| over the segment
        two bits  the second bit is 1 if |d| >= a; scales: the mean |d| of the elements whose second
                  bit is 0, and of those where it is 1; 0 for none

        Means are sums in double by halving: x[j] + x[j + 2048], then + x[j + 1024] and so on in
        each 4,096 elements, padded with zeros, and again with the sums; divided, and rounded once.

    Args:
        kernels: The arithmetic of directions.
        segments: Those of one bucket, in order.
        estimates: For each segment h, n elements float32, contiguous, of any shape. Read only.
        zero: The worker's coin.
        out: (blocks, 1 or 2, 8) int64. Overwritten.
        scales: (n_segments, 1 or 2) float32. Overwritten.

    Returns:
        As ``Kernels.encode_signs``: where it is False, bits and scales are 0.
    """
    n_planes = out.shape[1]
    directions = out.new_empty(out.shape[0], FLOAT_PLANES, BLOCK_WORDS)
    finite = kernels.encode_directions(segments, dtype=torch.float32, out=directions)
    values = directions.view(-1).view(torch.float32)
    planes = out.new_zeros(n_planes, out.shape[0] * BLOCK_WORDS)
    scales.zero_()
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        rest = values[_elements(slot)] - estimates[index].view(-1)
        sizes = rest.abs()
        mean = _mean(sizes, slot.n_elements)
        words = [pack(rest > 0) | (pack(rest == 0) & coin_bits(zero, slot, device=out.device))]
        found = [mean]
        if n_planes > 1:
            is_large = sizes >= mean
            words.append(pack(is_large))
            found = [_mean_of(sizes, ~is_large), _mean_of(sizes, is_large)]
        # Not a branch, which would wait for the device.
        is_finite = finite[index]
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
    """Return a worker's estimates after its vote; those without a vote as they are.

    Args:
        estimates: For each parameter h, as ``encode_rests``.
        slots: Their places in the bucket.
        present: For which of them the worker votes.
        votes: (blocks, 1 or 2, 8) int64 of the whole bucket.
        scales: (n_params, 1 or 2) float32.

    Returns:
        Of each parameter fl(h + q), q = +-scale; new tensors where it votes.
    """
    planes, after = split_planes(votes), list(estimates)
    for index, estimate in enumerate(estimates):
        slot = slots[index]
        if present[index] and slot.n_elements:
            steps = _read_steps(planes[:, _words(slot)], slot.n_elements, scales[index])
            after[index] = estimate + steps.view(estimate.shape)
    return after


def add_steps_of_all(
    estimates: Tensor,
    votes: Tensor,
    scales: Tensor,
    present: Tensor,
    bucket: Bucket,
    first_block: int,
) -> Tensor:
    """Return the estimates of all workers after their votes on some blocks.

    Args:
        estimates: (workers, 512 blocks) float32: h of each worker; 0 between parameters.
        votes: (workers, blocks, 1 or 2, 8) int64.
        scales: (workers, n_params, 1 or 2) float32.
        present: (workers, n_params) bool on the CPU.
        bucket: Where parameters lie.
        first_block: The bucket's block that ``votes`` begin with.

    Returns:
        (workers, 512 blocks) float32, new.
    """
    planes, after = split_planes(votes), estimates.clone()
    for index, slot in enumerate(bucket.slots):
        alone = replace(bucket, slots=(slot,))
        for run in cut_runs(
            alone, present[:, index : index + 1], first_block, votes.shape[1], device=votes.device
        ):
            start = run.words.start * WORD_ELEMENTS
            for worker in run.voters.tolist():
                after[worker, start : start + run.n_elements] += _read_steps(
                    planes[worker, :, run.words], run.n_elements, scales[worker, index]
                )
    return after


def count_estimates(
    kernels: Kernels,
    estimates: Tensor,
    present: Tensor,
    bucket: Bucket,
    first_block: int,
    tie: Coin,
    *,
    out: Tensor,
) -> None:
    """Take the sign of the sum of all workers' estimates, the tie coin's where it is 0.

    Args:
        kernels: The arithmetic of sums, in float32 and in rank order.
        estimates: (workers, blocks, 32, 8) int64, whose bytes are 512 values of each block.
        present: (workers, n_params) bool on the CPU. An absent worker's estimate counts as it is;
            of a parameter that nobody votes for, all bits are 0.
        bucket: Where parameters lie.
        first_block: The bucket's block that ``estimates`` begin with.
        tie: The coin.
        out: (blocks, 1, 8) int64. Overwritten.
    """
    voted = present.any(0, keepdim=True)
    everybody = voted.expand(len(estimates), -1).contiguous()
    signs = out.new_empty(out.shape[0], 2, BLOCK_WORDS)
    kernels.sum_directions(
        estimates, everybody, bucket, first_block, dtype=torch.float32, out=signs
    )
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
    """Return the mean of the sizes that are chosen; 0 for none."""
    return _mean(sizes.masked_fill(~chosen, 0.0), chosen.sum().clamp(min=1))


def _mean(sizes: Tensor, count: int | Tensor) -> Tensor:
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

"""Stochastic signs, and directions as tensors: arithmetic of votes on deltas outside the ops.

Plain torch over the ops of any backend. Sums are trees of fixed shape and all else is done element
by element, so that every backend and device returns equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import FLOAT32_MAX, Kernels, Segment
from distlion.kernels.feedback import FLOAT_PLANES, tree_mean
from distlion.kernels.words import draw_words, interleave, pack
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout, Slot

LOT_BITS = 16
LOTS = 1 << LOT_BITS


def read_directions(
    kernels: Kernels, segments: Sequence[Segment], bucket: BucketLayout, *, device: torch.device
) -> list[Tensor]:
    """Compute the direction of each segment: (n,) float32; zeros where one is not finite."""
    packed = torch.empty(
        bucket.n_blocks, FLOAT_PLANES, BLOCK_WORDS, dtype=torch.int64, device=device
    )
    kernels.encode_directions(segments, dtype=torch.float32, out=packed)
    values = packed.view(-1).view(torch.float32)
    return [values[_elements(segment.slot)] for segment in segments]


def draw_lots(lot: Coin, slot: Slot, *, device: torch.device) -> Tensor:
    """Draw a number from 0 to 65,535 for each element of a slot: (n,) int32.

    Element k among the coins takes 16 bits of word k // 4, those from bit 16 (k % 4) on.
    """
    first, skipped = divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)
    n_words = -(-(skipped + slot.n_elements) // 4)
    lanes = draw_words(lot, first, n_words, device=device).view(torch.int16)
    return (lanes[skipped : skipped + slot.n_elements].int() + LOTS) % LOTS


def encode_lots(
    kernels: Kernels,
    segments: Sequence[Segment],
    lot: Coin,
    *,
    out: Tensor,
    scales: Tensor,
    reach: Sequence[float] = (),
    spread: float | None = None,
) -> Tensor:
    """Encode directions as stochastic signs.

    Equation:
        b = reach of the segment; without any, fl(spread * mean |c|), or max |c|
        r = min(fl(32768 / b), FLT_MAX), the division in double; 0 where b = 0
        the bit is 1 if lot < 32768 + floor(fl(c * r)), with a lot in [0, 65536) for each element;
        the right side is at least 0 and at most 65536, so that beyond b the bit is certain
        scale: mean |c|, as ``encode_rests``

    Args:
        kernels: The arithmetic of directions.
        segments: Segments of one bucket, in order.
        lot: The worker's coin.
        out: (blocks, 1, 8) int64. Overwritten.
        scales: (n_segments, 1) float32. Overwritten.
        reach: For each segment b, rounded to float32; empty where it depends on the segment.
        spread: b in units of the mean |c|, rounded to float32.

    Returns:
        As ``Kernels.encode_rests``.
    """
    packed = out.new_empty(out.shape[0], FLOAT_PLANES, BLOCK_WORDS)
    finite = kernels.encode_directions(segments, dtype=torch.float32, out=packed)
    values = packed.view(-1).view(torch.float32)
    planes = out.new_zeros(1, out.shape[0] * BLOCK_WORDS)
    scales.zero_()
    for index, segment in enumerate(segments):
        slot = segment.slot
        if segment.grad is None or not slot.n_elements:
            continue
        directions = values[_elements(slot)]
        sizes = directions.abs()
        mean, most = tree_mean(sizes, slot.n_elements), sizes.max()
        is_finite = finite[index] & mean.isfinite()
        if reach:
            most = torch.full_like(mean, reach[index])
        elif spread is not None:
            most = mean * spread
        ratio = ((LOTS // 2) / most.double()).clamp(max=FLOAT32_MAX).float()
        ratio = ratio.masked_fill(most == 0, 0.0)
        level = (directions * ratio).floor().clamp(-(LOTS // 2), LOTS // 2).int() + LOTS // 2
        bits = pack(draw_lots(lot, slot, device=out.device) < level)
        words = slice(slot.bucket_word, slot.bucket_word + slot.n_words)
        planes[0, words] = bits.masked_fill(~is_finite, 0)
        scales[index, 0] = mean.masked_fill(~is_finite, 0.0)
        finite[index] = is_finite
    interleave(planes, out)
    return finite


def _elements(slot: Slot) -> slice:
    start = slot.bucket_word * WORD_ELEMENTS
    return slice(start, start + slot.n_elements)

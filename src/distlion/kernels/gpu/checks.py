"""Digests and square sums."""

import triton
import triton.language as tl

from distlion.kernels.gpu.bits import (
    ALIGNED,
    BFLOAT16,
    FIELDS,
    FIRST_TILE,
    N_ELEMENTS,
    PARAM,
    TILE,
    mix,
)
from distlion.kernels.gpu.encode import halve


@triton.jit
def digest_tile(row, first, left, BYTES: tl.constexpr, MASKED: tl.constexpr):
    """Sum the mixed elements of a tile."""
    inner = tl.arange(0, TILE)
    address = tl.load(row + PARAM)
    if BYTES == 1:
        pointer = address.to(tl.pointer_type(tl.uint8)) + first
    elif BYTES == 2:
        pointer = address.to(tl.pointer_type(tl.uint16)) + first
    else:
        pointer = address.to(tl.pointer_type(tl.uint32)) + first
    number = (first + 1 + inner).to(tl.uint64) * 0x9E3779B97F4A7C15
    if MASKED:
        bits = tl.load(pointer + inner, mask=inner < left, other=0)
        mixed = tl.where(inner < left, mix(bits.to(tl.uint64) + number), 0)
    else:
        mixed = mix(tl.load(tl.multiple_of(pointer, 16) + inner).to(tl.uint64) + number)
    return tl.sum(mixed.to(tl.int64, bitcast=True))


@triton.jit
def digest_kernel(table, tiles, totals, BYTES: tl.constexpr):
    """Add up the sums for digests of tensors with elements of BYTES bytes.

    Grid: one program a tile.
    Reads: tensors by the addresses of ``table``.
    Writes: adds to ``totals`` (k,) int64; sums modulo 2^64 do not depend on their order.
    """
    tile = tl.program_id(0)
    tensor = tl.load(tiles + tile)
    row = table + (tensor + 1).to(tl.int64) * FIELDS
    first = (tile - tl.load(row + FIRST_TILE)) * TILE
    left = tl.minimum(tl.load(row + N_ELEMENTS) - first, TILE).to(tl.int32)
    if (left == TILE) & (tl.load(row + ALIGNED) != 0):
        tl.atomic_add(totals + tensor, digest_tile(row, first, left, BYTES, False))
    else:
        tl.atomic_add(totals + tensor, digest_tile(row, first, left, BYTES, True))


@triton.jit(do_not_specialize=["n_elements"])
def square_sums_kernel(elements, n_elements, out, KIND: tl.constexpr):
    """Sum the squares of blocks of TILE elements by the fixed tree.

    Grid: one program a block.
    Reads: ``elements``, bfloat16 as its bits.
    Writes: ``out`` (blocks,) float64.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * TILE + tl.arange(0, TILE)
    stored = tl.load(elements + at, mask=at < n_elements, other=0)
    if KIND == BFLOAT16:
        x = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        x = stored.to(tl.float32).to(tl.float64)
    tl.store(out + block, halve(x * x, TILE))

"""Coins, digests, square sums and checksums."""

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
    draw,
    mix,
)
from distlion.kernels.gpu.encode import halve

WORD, N_WORDS = tl.constexpr(3), tl.constexpr(4)
LANES, TURNS = tl.constexpr(256), tl.constexpr(32)
CRC_POLYNOMIAL = tl.constexpr(0xEDB88320)
# Offsets of the parts of a checksum's table.
STEP_POWERS, LANE_POWERS, CHUNK_POWERS = tl.constexpr(1), tl.constexpr(33), tl.constexpr(33 + 256)


@triton.jit
def coin_kernel(table, out, BLOCK: tl.constexpr):
    """Draw words of a coin.

    Grid: one program for BLOCK words.
    Reads: the header of ``table``: coin, first word, number of words.
    Writes: ``out`` (n_words,) int64.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = draw(table, tl.load(table + WORD) + at)
    tl.store(out + at, words.to(tl.int64, bitcast=True), mask=at < tl.load(table + N_WORDS))


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


# CRC-32. A register is a polynomial over GF(2), bits reflected: bit 31 - i is the coefficient of
# x^i. It is linear in the bytes, so each word's part moves ahead alone, by a product with a power
# of x, and all parts are XORed. Rows are cut from their end, where zeros before them do not count.


@triton.jit
def multiply(one, other):
    """Multiply polynomials modulo the CRC's polynomial: uint32."""
    product = one & 0
    for i in tl.static_range(32):
        product ^= one & (0 - ((other >> (31 - i)) & 1))
        one = (one >> 1) ^ (CRC_POLYNOMIAL & (0 - (one & 1)))
    return product


@triton.jit
def step_ahead(register, steps):
    """Move registers ahead by LANES words; each bit of them stands for one entry of ``steps``."""
    moved = register & 0
    for i in tl.static_range(32):
        moved ^= tl.load(steps + i) & (0 - ((register >> i) & 1))
    return moved


@triton.jit(do_not_specialize=["row_stride", "n_bytes"])
def checksum_kernel(rows, row_stride, n_bytes, powers, starts, sums):
    """Add up the parts of the CRC-32 of rows of bytes.

    Grid: chunks of LANES * TURNS words from the end of a row on, rows.
    Reads: ``rows``; ``powers`` uint32: x^(8 n_bytes), 32 registers moved by LANES words, the power
        of each lane and each chunk; ``starts`` (k,) int64.
    Writes: XORs into ``sums`` (k,) int64.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = rows + row * row_stride
    # Words are numbered from the row's end: the first ones of a chunk have the largest numbers.
    n_words = (n_bytes + 3) // 4
    first = chunk.to(tl.int64) * (LANES * TURNS)
    n_turns = (tl.minimum(n_words - first, LANES * TURNS) + LANES - 1) // LANES
    register = tl.zeros((LANES,), tl.uint32)
    for turn in range(n_turns):
        number = first + (n_turns - 1 - turn) * LANES + (LANES - 1 - lane)
        at = n_bytes - 4 * (number + 1)
        word = tl.zeros((LANES,), tl.uint32)
        for byte in tl.static_range(4):
            octet = tl.load(begin + at + byte, mask=at + byte >= 0, other=0)
            word |= octet.to(tl.uint32) << (8 * byte)
        register = step_ahead(register, powers + STEP_POWERS) ^ word
    register = multiply(register, tl.load(powers + LANE_POWERS + lane))
    total = multiply(tl.xor_sum(register, axis=0), tl.load(powers + CHUNK_POWERS + chunk))
    if chunk == 0:
        start = tl.load(starts + row).to(tl.uint32) ^ 0xFFFFFFFF
        total ^= multiply(start, tl.load(powers))
    tl.atomic_xor(sums + row, total.to(tl.int64))

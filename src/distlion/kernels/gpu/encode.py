"""The encoding of votes: one pass over gradient and momentum, which are only read."""

import triton
import triton.language as tl

from distlion.kernels.gpu.bits import (
    ALIGNED,
    BETA2,
    BUCKET_WORD,
    EXP_AVG,
    FIELDS,
    FIRST_BIT,
    FIRST_TILE,
    FIRST_WORD,
    FLOAT32,
    GRAD,
    GRAD_SCALE,
    N_ELEMENTS,
    REST2,
    ROWS,
    TILE,
    WIDTH,
    blend_direction,
    draw_half_words,
    find_half_words,
    is_infinite_or_nan,
    mask_direction,
    narrow,
    pack,
    place_elements,
    read,
    store_half_words,
)

NONE, SIGNS, TERNARY, LEVELS, DIRECTIONS, PAIRS = (tl.constexpr(i) for i in range(6))
# The smallest float32 that rounds to an infinite bfloat16, of bits 0x7F7F8000.
BFLOAT16_INFINITE = tl.constexpr(3.3961775292304957e38)


@triton.jit
def halve(sums, LENGTH: tl.constexpr):
    """Add x[j] + x[j + h] until LENGTH numbers are one; a sum of two has one order."""
    if LENGTH == 1:
        return tl.sum(sums, axis=0)
    else:
        return halve(tl.sum(tl.reshape(sums, (2, LENGTH // 2)), axis=0), LENGTH // 2)


@triton.jit
def invert_scale(table, magnitude, left, L1: tl.constexpr):
    """Compute r of a scale block, which is a tile: min(fl(1 / (s * step)), FLT_MAX), or 0."""
    if L1:
        total = halve(tl.reshape(magnitude, (TILE,)).to(tl.float64), TILE)
        scale = (total / tl.minimum(left, TILE).to(tl.float64)).to(tl.float32)
    else:
        scale = tl.max(magnitude)
    step = tl.load(table + WIDTH).to(tl.float64, bitcast=True)
    inverse = 1.0 / (scale.to(tl.float64) * step)
    inverse = tl.minimum(inverse, 3.4028234663852886e38).to(tl.float32)
    return tl.where(scale == 0.0, 0.0, inverse)


@triton.jit
def write_bits(halves, bits, left, MASKED: tl.constexpr):
    """Write a plane of booleans."""
    store_half_words(halves, pack(bits), left, MASKED)


@triton.jit
def write_coins(
    table, row, halves, c, inner, first, left, SECOND: tl.constexpr, MASKED: tl.constexpr
):
    """Write the sign plane of a tile with zeros: 1 where c > 0, the zero coin where c = 0.

    With SECOND, ``Coin.second`` of that coin.
    """
    zeros = c == 0
    if MASKED:
        zeros = zeros & (inner < left)
    word = tl.load(row + FIRST_WORD) + first // 64
    coins = draw_half_words(table, word, tl.load(row + FIRST_BIT), SECOND)
    words = pack(c > 0) | (pack(zeros) & coins)
    store_half_words(halves, words, left, MASKED)


@triton.jit
def write_levels(
    table,
    halves,
    c,
    left,
    PLANES: tl.constexpr,
    L1: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write the planes of a after the sign plane."""
    magnitude = tl.abs(c)
    highest = (1 << (PLANES - 1)) - 1.0
    scaled = magnitude * invert_scale(table, magnitude, left, L1)
    # Clamped first, so that NaN and too large numbers are not cast. Casts truncate, as floor from
    # 0.
    level = tl.where(scaled < highest, scaled, highest).to(tl.int32)
    for plane in tl.static_range(1, PLANES):
        write_bits(halves + 16 * plane, ((level >> (plane - 1)) & 1) != 0, left, MASKED)


@triton.jit
def find_rare(c, least, moved, M_KIND: tl.constexpr, DIRECTION: tl.constexpr):
    """Return 2 if something may not be finite, else 1 if some vote is on 0, else 0: one for a tile.

    ``least`` is the smallest absolute value that an element's votes are on.

    A sum is no smaller than its largest term, and NaN if a term is. Only if it is large is each
    element checked.
    """
    limit = float("inf") if (M_KIND == FLOAT32 and DIRECTION == FLOAT32) else BFLOAT16_INFINITE
    # Four neighbors lie in one thread.
    total = tl.sum(tl.reshape(tl.abs(c) + tl.abs(moved), (ROWS, 8, 4)), axis=2)
    least = tl.min(tl.reshape(least, (ROWS, 8, 4)), axis=2)
    return tl.max(tl.where(total < limit, tl.where(least == 0.0, 1, 0), 2))


@triton.jit
def encode_tile(
    table,
    row,
    numbers,
    out,
    finite,
    first,
    left,
    VOTE: tl.constexpr,
    PLANES: tl.constexpr,
    L1: tl.constexpr,
    DIRECTION: tl.constexpr,
    KIND: tl.constexpr,
    M_KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode a tile: ``left`` elements from ``first`` on, all TILE of them unless MASKED."""
    inner = place_elements()
    g = read(tl.load(row + GRAD), first, inner, left, KIND, MASKED) * tl.load(numbers + GRAD_SCALE)
    m = read(tl.load(row + EXP_AVG), first, inner, left, M_KIND, MASKED)
    c = blend_direction(numbers, m, g)
    voted = mask_direction(numbers, c, g)
    moved = tl.load(numbers + BETA2) * m + tl.load(numbers + REST2) * g

    if VOTE == PAIRS:
        least = tl.minimum(tl.abs(voted), tl.abs(g))
    else:
        least = tl.abs(voted)
    rare = find_rare(c, least, moved, M_KIND, DIRECTION)

    first_word = tl.load(row + BUCKET_WORD) + first // 64
    if VOTE == DIRECTIONS:
        # In memory all values lie in order. The launch knows whether `out` is aligned.
        target = out + first_word * 64 + inner
        if MASKED:
            tl.store(target, narrow(voted, DIRECTION), mask=inner < left)
        else:
            tl.store(target, narrow(voted, DIRECTION))
    elif VOTE != NONE:
        halves = find_half_words(out, first_word, PLANES)
        write_bits(halves, voted > 0, left, MASKED)
        if VOTE == TERNARY:
            write_bits(halves + 16, voted != 0, left, MASKED)
        elif VOTE == PAIRS:
            write_bits(halves + 16, g > 0, left, MASKED)
            if rare != 0:
                write_coins(table, row, halves, voted, inner, first, left, False, MASKED)
                write_coins(table, row, halves + 16, g, inner, first, left, True, MASKED)
        else:
            if PLANES > 1:
                write_levels(table, halves, voted, left, PLANES, L1, MASKED)
            if rare != 0:
                write_coins(table, row, halves, voted, inner, first, left, False, MASKED)

    if rare == 2:
        bad = is_infinite_or_nan(c, DIRECTION) | is_infinite_or_nan(moved, M_KIND)
        if tl.max(bad.to(tl.int32)) != 0:
            tl.store(finite, 0)


@triton.jit
def encode_kernel(
    table,
    numbers,
    tiles,
    out,
    finite,
    VOTE: tl.constexpr,
    PLANES: tl.constexpr,
    L1: tl.constexpr,
    DIRECTION: tl.constexpr,
    KIND: tl.constexpr,
    M_KIND: tl.constexpr,
):
    """Encode the directions of parameters of one kind.

    Grid: one program a tile.
    Reads: gradients and momenta by the addresses of ``table``; ``numbers`` is it, as float32.
    Writes: ``out``, half words (values for DIRECTIONS), which must be zeros; 0 into ``finite`` of a
        parameter that is not.
    """
    tile = tl.program_id(0)
    segment = tl.load(tiles + tile)
    row = table + (segment + 1).to(tl.int64) * FIELDS
    if tl.load(row + GRAD) != 0:
        numbers += (segment + 1).to(tl.int64) * (2 * FIELDS)
        first = (tile - tl.load(row + FIRST_TILE)) * TILE
        left = tl.minimum(tl.load(row + N_ELEMENTS) - first, TILE).to(tl.int32)
        flag = finite + segment
        if (left == TILE) & (tl.load(row + ALIGNED) != 0):
            encode_tile(
                table, row, numbers, out, flag, first, left,
                VOTE, PLANES, L1, DIRECTION, KIND, M_KIND, False,
            )  # fmt: skip
        else:
            encode_tile(
                table, row, numbers, out, flag, first, left,
                VOTE, PLANES, L1, DIRECTION, KIND, M_KIND, True,
            )  # fmt: skip


@triton.jit
def blank_kernel(table, tiles, out, finite, PLANES: tl.constexpr, LINEAR: tl.constexpr):
    """Write zeros over the votes of parameters that are not finite.

    Grid: one program a tile.
    Reads: ``table``, ``finite``.
    Writes: ``out``, half words: with LINEAR of values in order, else of planes.
    """
    tile = tl.program_id(0)
    segment = tl.load(tiles + tile)
    if tl.load(finite + segment) == 0:
        row = table + (segment + 1).to(tl.int64) * FIELDS
        first = (tile - tl.load(row + FIRST_TILE)) * TILE
        left = tl.minimum(tl.load(row + N_ELEMENTS) - first, TILE).to(tl.int32)
        kept = tl.arange(0, ROWS) < (left + 63) // 64 * 2
        zeros = tl.zeros((ROWS,), tl.int32)
        first_word = tl.load(row + BUCKET_WORD) + first // 64
        for plane in range(PLANES):
            if LINEAR:
                begin = out + first_word * (2 * PLANES) + plane
                tl.store(begin + tl.arange(0, ROWS) * PLANES, zeros, mask=kept)
            else:
                halves = find_half_words(out, first_word, PLANES)
                tl.store(halves + 16 * plane, zeros, mask=kept)

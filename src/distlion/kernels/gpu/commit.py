"""The commit: read gradient, momentum, parameter and reply; write momentum and parameter."""

import triton
import triton.language as tl

from distlion.kernels.gpu.bits import (
    ALIGNED,
    BETA2,
    BFLOAT16,
    BUCKET_WORD,
    DECAY,
    EXP_AVG,
    FIELDS,
    FIRST_BIT,
    FIRST_TILE,
    FIRST_WORD,
    GRAD,
    GRAD_SCALE,
    INFINITY_BITS,
    N_ELEMENTS,
    PARAM,
    PRESENT,
    REST2,
    ROWS,
    STEP_WIDTH,
    TILE,
    blend_direction,
    draw,
    find_half_words,
    load_half_words,
    mask_direction,
    place_elements,
    read,
    unpack,
    write,
)

SIGN, TERNARY, COUNT, OWN, NO_REPLY = (tl.constexpr(i) for i in range(5))


@triton.jit
def read_step(
    row,
    numbers,
    reply,
    first,
    left,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute fl(a * S) of the reply."""
    halves = find_half_words(reply, tl.load(row + BUCKET_WORD) + first // 64, PLANES)
    width = tl.load(numbers + STEP_WIDTH)
    bits = unpack(load_half_words(halves, left, MASKED))
    if FORMAT == SIGN:
        # a times one or minus one, which only changes the sign of a.
        return ((~bits << 31) ^ width.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    elif FORMAT == TERNARY:
        moves = unpack(load_half_words(halves + 16, left, MASKED))
        sign = tl.where((bits & 1) != 0, 1.0, -1.0)
        return tl.where((moves & 1) != 0, sign, 0.0) * width
    else:
        count = bits & 1
        for plane in tl.static_range(1, PLANES):
            bits = unpack(load_half_words(halves + 16 * plane, left, MASKED))
            count |= (bits & 1) << plane
        return (2 * count - tl.load(row + PRESENT).to(tl.int32)).to(tl.float32) * width


@triton.jit
def round_at_random(table, row, first, x):
    """Add 16 bits of the coin below bfloat16's mantissa, then cut them off.

    A word has bits for four neighbors, which lie in one thread.
    """
    number = tl.load(row + FIRST_WORD) * 64 + tl.load(row + FIRST_BIT) + first
    skipped = (number % 4).to(tl.int32)
    quad = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    word = number // 4 + quad
    drawn = draw(table, word)
    if skipped != 0:
        drawn >>= (16 * skipped).to(tl.uint64)
        drawn |= draw(table, word + 1) << (64 - 16 * skipped).to(tl.uint64)
    shift = (16 * tl.arange(0, 4)).to(tl.uint64)[None, None, :]
    noise = (drawn[:, :, None] >> shift).to(tl.uint32) & 0xFFFF
    noise = tl.reshape(noise, (ROWS, 32))
    bits = x.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7FFFFFFF) < INFINITY_BITS
    rounded = (bits + noise) & 0xFFFF0000
    return tl.where(is_finite, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def move_param(
    table,
    row,
    numbers,
    first,
    inner,
    left,
    step,
    STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write x' = fl(fl(d * x) - fl(a * S)); ``step`` is fl(a * S)."""
    param = tl.load(row + PARAM)
    x = read(param, first, inner, left, KIND, MASKED)
    x = tl.load(numbers + DECAY) * x - step
    if STOCHASTIC and KIND == BFLOAT16:
        x = round_at_random(table, row, first, x)
    write(param, first, inner, left, x, KIND, MASKED)


@triton.jit
def move_tile(
    table,
    row,
    numbers,
    reply,
    first,
    left,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr,
    M_KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Move a tile: ``left`` elements from ``first`` on, all TILE of them unless MASKED."""
    inner = place_elements()
    if FORMAT != OWN and FORMAT != NO_REPLY:
        step = read_step(row, numbers, reply, first, left, FORMAT, PLANES, MASKED)
        move_param(table, row, numbers, first, inner, left, step, STOCHASTIC, KIND, MASKED)
    grad = tl.load(row + GRAD)
    exp_avg = tl.load(row + EXP_AVG)
    # A worker without a gradient keeps its momentum.
    if grad != 0:
        g = read(grad, first, inner, left, KIND, MASKED) * tl.load(numbers + GRAD_SCALE)
        m = read(exp_avg, first, inner, left, M_KIND, MASKED)
        if FORMAT == OWN:
            c = mask_direction(numbers, blend_direction(numbers, m, g), g)
            s = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
            step = s * tl.load(numbers + STEP_WIDTH)
            move_param(table, row, numbers, first, inner, left, step, STOCHASTIC, KIND, MASKED)
        moved = tl.load(numbers + BETA2) * m + tl.load(numbers + REST2) * g
        write(exp_avg, first, inner, left, moved, M_KIND, MASKED)


@triton.jit
def commit_kernel(
    table,
    numbers,
    tiles,
    reply,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr,
    M_KIND: tl.constexpr,
):
    """Move parameters of one kind and their momenta, or only these.

    Grid: one program a tile.
    Reads: gradients, momenta and parameters by the addresses of ``table``; ``numbers`` is it, as
        float32; ``reply``, half words, except for OWN (a step of plain Lion) and NO_REPLY.
    Writes: parameters, except for NO_REPLY; momenta where there is a gradient.
    """
    tile = tl.program_id(0)
    segment = tl.load(tiles + tile)
    row = table + (segment + 1).to(tl.int64) * FIELDS
    if tl.load(row + PRESENT) != 0:
        numbers += (segment + 1).to(tl.int64) * (2 * FIELDS)
        first = (tile - tl.load(row + FIRST_TILE)) * TILE
        left = tl.minimum(tl.load(row + N_ELEMENTS) - first, TILE).to(tl.int32)
        if (left == TILE) & (tl.load(row + ALIGNED) != 0):
            move_tile(
                table, row, numbers, reply, first, left,
                FORMAT, PLANES, STOCHASTIC, KIND, M_KIND, False,
            )  # fmt: skip
        else:
            move_tile(
                table, row, numbers, reply, first, left,
                FORMAT, PLANES, STOCHASTIC, KIND, M_KIND, True,
            )  # fmt: skip

"""Shared functions of the kernels: read and write numbers, pack bits into words, draw coins.

A program works on a *tile*: 4,096 elements of one parameter, which is 64 words or one scale block.
Inside, it is (ROWS, 32): 128 half words of 32 bits. Neighbors of one thread are 16 bytes, and
neighboring threads read neighboring bytes, so that memory gives whole lines. Words are read and
written as two int32 halves, the lower one first.

Every float operation rounds once: kernels are launched with ``enable_fp_fusion=False``, and avoid
operations that Triton compiles to another rounding (``tl.fma``, float32 ``/``, ``tl.floor``).
"""

import triton
import triton.language as tl

FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TILE, ROWS = tl.constexpr(4096), tl.constexpr(128)
INFINITY_BITS = tl.constexpr(0x7F800000)

# Fields of a table. Row 0 is the header; the others are one parameter each (``table.py``).
KEY, INVERTED, WIDTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIELDS = tl.constexpr(16)
PARAM, GRAD, EXP_AVG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
N_ELEMENTS, BUCKET_WORD, FIRST_WORD = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
FIRST_BIT, FIRST_TILE, PRESENT = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
ALIGNED = tl.constexpr(9)
# Two float32 in each of the last fields, numbered as float32.
BETA1, REST1, BETA2, REST2 = (tl.constexpr(20 + i) for i in range(4))
DECAY, STEP_WIDTH, GRAD_SCALE, CAUTIOUS = (tl.constexpr(24 + i) for i in range(4))


@triton.jit
def place_elements():
    """Return the numbers of a tile's elements: (ROWS, 32) int32."""
    return tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def point_at(address, first, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Return the pointer to element ``first`` of a tensor; bfloat16 is handled as its bits."""
    if KIND == FLOAT32:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == BFLOAT16:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
    if not MASKED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + first


@triton.jit
def read(address, first, inner, left, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Load elements, widened to float32: all at 16 bytes each, or 0 from ``left`` on."""
    pointer = point_at(address, first, KIND, MASKED)
    if MASKED:
        stored = tl.load(pointer + inner, mask=inner < left, other=0)
    else:
        stored = tl.load(pointer + inner)
    if KIND == BFLOAT16:
        return (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def narrow(value, KIND: tl.constexpr):
    """Round to the storage dtype, to nearest even.

    bfloat16 by integers: casts of the interpreter truncate.
    """
    if KIND == FLOAT32:
        return value
    elif KIND == BFLOAT16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value != value, 0x7FC0, rounded).to(tl.uint16)
    else:
        return value.to(tl.float16)


@triton.jit
def write(address, first, inner, left, value, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Store the elements that ``read`` would load."""
    pointer = point_at(address, first, KIND, MASKED)
    if MASKED:
        tl.store(pointer + inner, narrow(value, KIND), mask=inner < left)
    else:
        tl.store(pointer + inner, narrow(value, KIND))


@triton.jit
def is_infinite_or_nan(value, KIND: tl.constexpr):
    """Return whether a float32 is not finite once it is stored."""
    bits = value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    if KIND == BFLOAT16:
        return bits + 0x7FFF + ((bits >> 16) & 1) >= INFINITY_BITS
    else:
        return bits >= INFINITY_BITS


@triton.jit
def find_half_words(packed, first_word, PLANES: tl.constexpr):
    """Point at plane 0 of the tile's ROWS half words; plane p is 16 p half words further."""
    block = first_word // 8
    half = 2 * (first_word - block * 8).to(tl.int32) + tl.arange(0, ROWS)
    if PLANES > 1:
        half = (half // 16) * (16 * PLANES) + half % 16
    return packed + block * (16 * PLANES) + half


@triton.jit
def load_half_words(halves, left, MASKED: tl.constexpr):
    """Load a tile's half words: (ROWS,) int32, 0 after the words of ``left`` elements."""
    if MASKED:
        return tl.load(halves, mask=tl.arange(0, ROWS) < (left + 63) // 64 * 2, other=0)
    else:
        return tl.load(halves)


@triton.jit
def store_half_words(halves, words, left, MASKED: tl.constexpr):
    """Store the half words that ``load_half_words`` would load."""
    if MASKED:
        tl.store(halves, words, mask=tl.arange(0, ROWS) < (left + 63) // 64 * 2)
    else:
        tl.store(halves, words)


@triton.jit
def pack(are_set):
    """Pack (ROWS, 32) booleans into (ROWS,) half words."""
    return tl.sum(tl.where(are_set, 1 << tl.arange(0, 32)[None, :], 0), axis=1)


@triton.jit
def unpack(halves):
    """Unpack (ROWS,) half words: bit 0 of each element is its bit, others are garbage."""
    return halves[:, None] >> tl.arange(0, 32)[None, :]


@triton.jit
def mix(z):
    """Compute ``coin.mix`` of z, uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw(table, word, SECOND: tl.constexpr = False):
    """Draw words (int64 numbers) of the header's coin, or of its second one: uint64."""
    key = tl.load(table + KEY).to(tl.uint64, bitcast=True)
    if SECOND:
        key = mix(key)
    inverted = tl.load(table + INVERTED).to(tl.uint64, bitcast=True)
    return mix(key + (word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) ^ inverted


@triton.jit
def draw_half_words(table, first_word, first_bit, SECOND: tl.constexpr = False):
    """Draw a bit for each element of a tile that begins at that bit of the coin: (ROWS,) int32."""
    row = tl.arange(0, ROWS)
    word = first_word + row // 2
    bits = draw(table, word, SECOND)
    if first_bit != 0:
        above = (64 - first_bit).to(tl.uint64)
        bits = (bits >> first_bit.to(tl.uint64)) | (draw(table, word + 1, SECOND) << above)
    half = bits >> ((row % 2) * 32).to(tl.uint64)
    return half.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def blend_direction(numbers, m, g):
    """Compute c, before the mask of a cautious parameter."""
    return tl.load(numbers + BETA1) * m + tl.load(numbers + REST1) * g


@triton.jit
def mask_direction(numbers, c, g):
    """Return c, or +0 where a cautious parameter's c does not have the sign of g."""
    if tl.load(numbers + CAUTIOUS) != 0:  # the same for a whole tile
        c = tl.where(((c > 0) & (g > 0)) | ((c < 0) & (g < 0)), c, 0.0)
    return c

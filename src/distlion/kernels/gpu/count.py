"""The count of votes, at the owner of a shard or for all virtual workers at once."""

import triton
import triton.language as tl

from distlion.kernels.gpu.bits import (
    BUCKET_WORD,
    FIELDS,
    FIRST_BIT,
    FIRST_TILE,
    FIRST_WORD,
    FLOAT32,
    N_ELEMENTS,
    PRESENT,
    ROWS,
    TILE,
    draw_half_words,
    find_half_words,
    load_half_words,
    pack,
    place_elements,
    store_half_words,
    unpack,
)
from distlion.kernels.gpu.commit import COUNT, SIGN
from distlion.kernels.gpu.commit import TERNARY as TERNARY_REPLY
from distlion.kernels.gpu.encode import DIRECTIONS, PAIRS
from distlion.kernels.gpu.encode import TERNARY as TERNARY_VOTE


@triton.jit
def add_votes(
    total,
    votes,
    first_word,
    left,
    VOTE: tl.constexpr,
    PLANES: tl.constexpr,
    DIRECTION: tl.constexpr,
):
    """Add the votes of one worker: odd levels, -1, 0, 1, directions, or the first of a pair."""
    if VOTE == DIRECTIONS:
        inner = place_elements()
        stored = tl.load(votes + first_word * 64 + inner, mask=inner < left, other=0)
        if DIRECTION == FLOAT32:
            return total + stored
        else:
            return total + (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        halves = find_half_words(votes, first_word, PLANES)
        sign = 2 * (unpack(load_half_words(halves, left, True)) & 1) - 1
        if VOTE == TERNARY_VOTE:
            return total + sign * (unpack(load_half_words(halves + 16, left, True)) & 1)
        elif VOTE != PAIRS and PLANES > 1:
            size = tl.full((ROWS, 32), 1, tl.int32)
            for plane in tl.static_range(1, PLANES):
                bits = unpack(load_half_words(halves + 16 * plane, left, True))
                size += (bits & 1) << plane
            return total + sign * size
        else:
            return total + sign


@triton.jit
def add_ballot(
    total,
    second,
    votes,
    first_word,
    left,
    VOTE: tl.constexpr,
    PLANES: tl.constexpr,
    DIRECTION: tl.constexpr,
):
    """Add the votes of one worker to ``total``, and the second of pairs to ``second``."""
    total = add_votes(total, votes, first_word, left, VOTE, PLANES, DIRECTION)
    if VOTE == PAIRS:
        second = add_votes(second, votes + 16, first_word, left, VOTE, PLANES, DIRECTION)
    return total, second


@triton.jit(do_not_specialize=["n_workers", "worker_stride"])
def count_kernel(
    table,
    voters,
    tiles,
    votes,
    out,
    n_workers,
    worker_stride,
    VOTE: tl.constexpr,
    PLANES: tl.constexpr,
    DIRECTION: tl.constexpr,
    REPLY: tl.constexpr,
    REPLY_PLANES: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Add the votes of the workers present, and write the reply.

    Grid: one program a tile of a run, the part of a parameter that lies in the blocks at hand.
    Reads: ``table``, whose BUCKET_WORD is the run's first word in these blocks; ``voters``
        (runs, n_workers) int32, 0 for absent, else 1 or, if WEIGHTED, the times that it counts;
        ``votes``, half words (values for DIRECTIONS) of
        which each worker has ``worker_stride``.
    Writes: ``out``, half words, which must be zeros.
    """
    tile = tl.program_id(0)
    run = tl.load(tiles + tile).to(tl.int64)
    row = table + (run + 1) * FIELDS
    first = (tile - tl.load(row + FIRST_TILE)) * TILE
    left = tl.minimum(tl.load(row + N_ELEMENTS) - first, TILE).to(tl.int32)
    first_word = tl.load(row + BUCKET_WORD) + first // 64

    if VOTE == DIRECTIONS:
        total = tl.zeros((ROWS, 32), tl.float32)
    else:
        total = tl.zeros((ROWS, 32), tl.int32)
    second = total  # of pairs
    for worker in range(n_workers):
        times = tl.load(voters + run * n_workers + worker)
        if WEIGHTED:
            for _ in range(times):
                total, second = add_ballot(
                    total, second, votes, first_word, left, VOTE, PLANES, DIRECTION
                )
        elif times != 0:
            total, second = add_ballot(
                total, second, votes, first_word, left, VOTE, PLANES, DIRECTION
            )
        votes += worker_stride
    if VOTE == PAIRS:
        agree = ((total > 0) & (second > 0)) | ((total < 0) & (second < 0))
        total = tl.where(agree, total, 0)

    is_there = place_elements() < left
    halves = find_half_words(out, first_word, REPLY_PLANES)
    if REPLY == COUNT:
        ones = (total + tl.load(row + PRESENT).to(tl.int32)) >> 1
        for plane in tl.static_range(REPLY_PLANES):
            bits = (((ones >> plane) & 1) != 0) & is_there
            store_half_words(halves + 16 * plane, pack(bits), left, True)
    elif REPLY == TERNARY_REPLY:
        store_half_words(halves, pack((total > 0) & is_there), left, True)
        store_half_words(halves + 16, pack((total != 0) & is_there), left, True)
    else:
        tl.static_assert(REPLY == SIGN)
        words = pack((total > 0) & is_there)
        ties = pack((total == 0) & is_there)
        coin_word = tl.load(row + FIRST_WORD) + first // 64
        words |= ties & draw_half_words(table, coin_word, tl.load(row + FIRST_BIT))
        store_half_words(halves, words, left, True)

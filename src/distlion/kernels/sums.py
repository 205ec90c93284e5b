"""Sums of votes as bit planes, which add up without being unpacked. Plain torch only.

A vote v of p bits is written as a level l >= 0, so that a sum of levels has no sign:

    LEVEL    l = (v + 2^p - 1) / 2    v odd, |v| < 2^p
    TERNARY  l = v + 1                v in {-1, 0, 1}

An absent worker has l = 0. The number n of votes on a parameter gives the sum of levels of a tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import ReplyFormat, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.words import Run, coin_bits, cut_runs, interleave, split_planes
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout


def start_sum(votes: BlockVotes, *, vote_format: VoteFormat) -> Tensor:
    """Write one worker's vote as levels.

    Args:
        votes: Of one worker, on the whole bucket.
        vote_format: How they are encoded: LEVEL or TERNARY.

    Returns:
        (vote_planes, words of the bucket) int64, the lowest bit first; 0 where it abstains, and in
        spare bits.
    """
    packed, present, bucket, _ = votes
    planes = split_planes(packed[0])
    n_words, device = planes.shape[1], packed.device
    runs = cut_runs(bucket, present, 0, n_words // BLOCK_WORDS, device=device)
    mask = _mask(list(runs), n_words, device=device)
    sign = planes[0] & mask
    if vote_format is VoteFormat.TERNARY:
        return torch.stack([~planes[1] & mask, sign & planes[1]])
    # Of a negative vote, a is counted down from the top: as all bits of it inverted.
    return torch.cat([(planes[1:] ^ ~sign) & mask, sign.unsqueeze(0)])


def add_sums(first: Tensor, second: Tensor, n_planes: int) -> Tensor:
    """Add two sums, bit by bit for 64 elements at a time.

    Args:
        first: (planes, words) int64, as ``start_sum`` returns it.
        second: Likewise; perhaps of another number of planes.
        n_planes: Bits that the sum may take, at least as many as either has.

    Returns:
        (n_planes, words) int64.
    """
    out = first.new_empty(n_planes, first.shape[1])
    nothing = first.new_zeros(first.shape[1])
    carry = nothing
    for plane in range(n_planes):
        a = first[plane] if plane < len(first) else nothing
        b = second[plane] if plane < len(second) else nothing
        half = a ^ b
        torch.bitwise_xor(half, carry, out=out[plane])
        carry = (a & b) | (half & carry)
    return out


def settle_sum(
    total: Tensor,
    n_present: Tensor,
    bucket: BucketLayout,
    tie: Coin,
    *,
    vote_planes: int,
    vote_format: VoteFormat,
    reply_format: ReplyFormat,
    out: Tensor,
) -> None:
    """Turn the sum of all levels into the reply, bitwise what counting all votes at once gives.

    Args:
        total: (planes, words of the bucket) int64.
        n_present: (n_params,) int64 on the CPU: how many voted for each parameter.
        bucket: Where parameters lie.
        tie: Decides a sum of 0 where a reply has only signs.
        vote_planes: p, bits of a vote.
        vote_format: How votes are encoded.
        reply_format: How the reply encodes S; COUNT is of votes of 1 bit.
        out: (blocks, reply_planes, 8) int64. Overwritten.
    """
    n_words, device = total.shape[1], total.device
    planes = out.new_zeros(out.shape[1], n_words)
    n_blocks = n_words // BLOCK_WORDS
    for n in sorted(set(n_present.tolist()) - {0}):
        runs = list(cut_runs(bucket, (n_present == n)[None], 0, n_blocks, device=device))
        mask = _mask(runs, n_words, device=device)
        if reply_format is ReplyFormat.COUNT:
            rows = min(len(planes), len(total))
            planes[:rows] |= total[:rows] & mask
            continue
        twice = 2 * n if vote_format is VoteFormat.TERNARY else n * ((1 << vote_planes) - 1)
        above, level = _compare(total, twice // 2)
        # An odd number of odd votes never ends in a tie.
        tied = level & mask if twice % 2 == 0 else torch.zeros_like(level)
        planes[0] |= above & mask
        if reply_format is ReplyFormat.TERNARY:
            planes[1] |= mask & ~tied
        elif twice % 2 == 0:
            for run in runs:
                flips = coin_bits(tie, run, device=device)
                planes[0, run.words] |= tied[run.words] & flips
    interleave(planes, out)


def _compare(total: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Find the elements above a bound, and those at it: (words,) int64 each."""
    above, level = torch.zeros_like(total[0]), torch.full_like(total[0], -1)
    if bound >> len(total):
        return above, above
    for plane in range(len(total) - 1, -1, -1):
        if bound >> plane & 1:
            level = level & total[plane]
        else:
            above = above | (level & total[plane])
            level = level & ~total[plane]
    return above, level


def _mask(runs: list[Run], n_words: int, *, device: torch.device) -> Tensor:
    """Mark the elements of some runs, of one parameter each: (words,) int64."""
    mask = torch.zeros(n_words, dtype=torch.int64, device=device)
    for run in runs:
        mask[run.words] = -1
        spare = run.n_elements % WORD_ELEMENTS
        if spare:
            mask[run.words.stop - 1] = (1 << spare) - 1
    return mask

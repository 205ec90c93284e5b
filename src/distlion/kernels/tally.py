"""Partial counts: sums of some workers' votes, which add up to the full count. Plain torch only."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import ReplyFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.words import (
    Run,
    coin_bits,
    cut_runs,
    interleave,
    pack,
    split_planes,
    unpack,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout


class VoteFormat(Enum):
    """Meanings of the planes of a vote."""

    LEVEL = "level"
    """Plane 0 is the sign, the others, lowest first, the bits of a: sign * (2 a + 1)."""
    TERNARY = "ternary"
    """Plane 0 is the sign, plane 1 whether it is not 0."""
    PAIR = "pair"
    """Plane 0 is the sign of the direction, plane 1 that of the gradient: two votes."""
    DIRECTION = "direction"
    """The bits of a float. Sums of floats depend on their order, so there are no partial sums."""
    STEP = "step"
    """Plane 0 is the sign; plane 1, if any, selects one of the parameter's two scales."""

    @property
    def has_partial_sums(self) -> bool:
        """True if a vote is one integer: a sum of them has no order, and is one number."""
        return self in (VoteFormat.LEVEL, VoteFormat.TERNARY)


def tally_votes(votes: BlockVotes, *, vote_format: VoteFormat) -> Tensor:
    """Add the votes of some workers.

    Args:
        votes: Their votes.
        vote_format: Their format: LEVEL or TERNARY.

    Returns:
        (512 * blocks,) int32, 0 where nobody votes. 65,535 workers of 8 bits stay below 2^24.
    """
    packed, present, bucket, first_block = votes
    n_blocks, device = packed.shape[1], packed.device
    planes = split_planes(packed)
    tally = torch.zeros(n_blocks * BLOCK_WORDS * WORD_ELEMENTS, dtype=torch.int32, device=device)
    for run in cut_runs(bucket, present, first_block, n_blocks, device=device):
        sign = 2 * run.bits(planes, 0).to(torch.int32) - 1
        if vote_format is VoteFormat.TERNARY:
            size = run.bits(planes, 1).to(torch.int32)
        else:
            size = torch.ones_like(sign)
            for plane in range(1, packed.shape[2]):
                size += run.bits(planes, plane).to(torch.int32) << plane
        tally[_elements(run)] = (sign * size).sum(0, dtype=torch.int32)
    return tally


def settle_tally(
    tally: Tensor,
    n_present: Tensor,
    bucket: BucketLayout,
    first_block: int,
    tie: Coin,
    *,
    reply_format: ReplyFormat,
    out: Tensor,
) -> None:
    """Turn the sum of all votes into the reply, bitwise what counting all votes at once gives.

    Args:
        tally: (512 * blocks,) int32, all workers' tallies added.
        n_present: (n_params,) int64 on the CPU: number of votes for each parameter.
        bucket: The layout of the parameters.
        first_block: The bucket's block that ``tally`` begins with.
        tie: Coin for a sum of 0, if the reply has only signs.
        reply_format: The format of the reply.
        out: (blocks, reply_planes, 8) int64. Overwritten.
    """
    n_blocks, device = out.shape[0], tally.device
    planes = out.new_zeros(out.shape[1], n_blocks * BLOCK_WORDS)
    voters = n_present.tolist()
    for index, slot in enumerate(bucket.slots):
        n = voters[index]
        alone, anybody = (
            replace(bucket, slots=(slot,)),
            torch.tensor([[n > 0]], dtype=torch.bool, device="cpu"),
        )
        for run in cut_runs(alone, anybody, first_block, n_blocks, device=device):
            total = tally[_elements(run)]
            if reply_format is ReplyFormat.COUNT:
                ones = (total + n) >> 1
                bits = [(ones >> bit) & 1 for bit in range(out.shape[1])]
            elif reply_format is ReplyFormat.TERNARY:
                bits = [total > 0, total != 0]
            else:
                flips = coin_bits(tie, run, device=device)
                bits = [torch.where(total == 0, unpack(flips, run.n_elements), total > 0)]
            for plane, row in enumerate(bits):
                planes[plane, run.words] = pack(row)
    interleave(planes, out)


def _elements(run: Run) -> slice:
    """Return a run's range among the elements at hand."""
    start = run.words.start * WORD_ELEMENTS
    return slice(start, start + run.n_elements)

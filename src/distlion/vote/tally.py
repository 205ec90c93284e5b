"""A rule's votes counted in parts, for patterns that pass on partial counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.kernels import BlockVotes, Coins, settle_tally, tally_votes
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket
from distlion.vote.roster import Roster
from distlion.vote.rule import Rule


@dataclass(frozen=True)
class RuleTally:
    """Count some workers' votes, add such counts, and turn the sum into the reply: bytes only.

    Equation:
        tally = sum_i w_i vote_i over some workers, an int32 for each element; tallies add up in any
        order, and the reply to their sum is that to all votes, bitwise

    Attributes:
        rule: Any whose votes are integers.
        bucket: Where parameters lie.
        coins: The coins of this step; only those that are equal on all workers are used.
        n_votes: The most votes that a parameter can get.
        roster: Everybody who votes, with the weights w_i; None where every vote counts once.
    """

    rule: Rule
    bucket: Bucket
    coins: Coins
    n_votes: int
    roster: Roster | None = None

    def tally(
        self,
        votes: Tensor,
        present: Tensor,
        first_shard: int,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        if self.roster is not None:
            present = self.roster.weigh(present, rows)
        packed = votes.contiguous().view(torch.int64)
        packed = packed.view(len(votes), -1, self.rule.vote_planes, BLOCK_WORDS)
        first_block = first_shard * self.bucket.shard_blocks
        cast = BlockVotes(packed, present, self.bucket, first_block)
        return tally_votes(cast, vote_format=self.rule.vote_format).view(torch.uint8)

    def combine(self, tallies: Tensor) -> Tensor:
        return tallies.contiguous().view(torch.int32).sum(0, dtype=torch.int32).view(torch.uint8)

    def settle(self, tally: Tensor, n_present: Tensor, first_shard: int) -> Tensor:
        sums, bucket = tally.contiguous().view(torch.int32), self.bucket
        n_blocks = sums.numel() // (BLOCK_WORDS * WORD_ELEMENTS)
        planes = self.rule.reply_planes(self.n_votes)
        out = torch.empty(n_blocks, planes, BLOCK_WORDS, dtype=torch.int64, device=sums.device)
        settle_tally(
            sums,
            n_present,
            bucket,
            first_shard * bucket.shard_blocks,
            self.coins.tie,
            reply_format=self.rule.reply_format,
            out=out,
        )
        return out.view(-1).view(torch.uint8)

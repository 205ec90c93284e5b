"""A rule's votes counted in parts, for patterns that pass on partial counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coins
from distlion.kernels.counting import BlockVotes
from distlion.kernels.sums import add_sums, settle_sum, start_sum
from distlion.kernels.tally import settle_tally, tally_votes
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout, count_sum_planes
from distlion.votes.roster import Roster

if TYPE_CHECKING:
    from distlion.votes.aggregation import Aggregation


@dataclass(frozen=True)
class RuleTally:
    """Count some workers' votes, add such counts, and turn the sum into the reply: bytes only.

    Equation:
        tally = sum_i w_i vote_i over some workers, an int32 for each element; tallies add up in any
        order, and the reply to their sum is that to all votes, bitwise

    Attributes:
        rule: A rule with integer votes.
        bucket: The layout of the parameters.
        coins: The coins of this step; only those that are equal on all workers are used.
        n_votes: The most votes that a parameter can get.
        roster: All voters, with the weights w_i; None if every vote counts once.
    """

    rule: Aggregation
    bucket: BucketLayout
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

    def start_sum(self, votes: Tensor, present: Tensor) -> Tensor:
        if self.roster is not None and self.roster.is_weighted:
            raise InvalidArgumentError(
                "packed sums count votes alike, and workers have weights. Expected weights of 1; "
                "or use a pattern without packed sums, such as AllReduce()"
            )
        packed = votes.contiguous().view(torch.int64)
        packed = packed.view(1, -1, self.rule.vote_planes, BLOCK_WORDS)
        cast = BlockVotes(packed, present.unsqueeze(0), self.bucket, 0)
        planes = start_sum(cast, vote_format=self.rule.vote_format)
        return planes.view(-1).view(torch.uint8)

    def add_sums(self, first: Tensor, second: Tensor, n_votes: int) -> Tensor:
        n_planes = count_sum_planes(self.rule.vote_planes, n_votes)
        planes = add_sums(self._planes_of(first), self._planes_of(second), n_planes)
        return planes.view(-1).view(torch.uint8)

    def settle_sum(self, total: Tensor, n_present: Tensor) -> Tensor:
        bucket, rule = self.bucket, self.rule
        planes = rule.reply_planes(self.n_votes)
        out = total.new_empty(bucket.n_blocks, planes, BLOCK_WORDS, dtype=torch.int64)
        settle_sum(
            self._planes_of(total),
            n_present,
            bucket,
            self.coins.tie,
            vote_planes=rule.vote_planes,
            vote_format=rule.vote_format,
            reply_format=rule.reply_format,
            out=out,
        )
        return out.view(-1).view(torch.uint8)

    def _planes_of(self, total: Tensor) -> Tensor:
        n_words = self.bucket.n_blocks * BLOCK_WORDS
        words = total.contiguous().view(torch.int64)
        return words.view(-1, n_words) if n_words else words.view(1, 0)

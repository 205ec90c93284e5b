"""A rule's votes counted in parts, for patterns that pass on partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coins
from distlion.kernels.counting import BlockVotes
from distlion.kernels.sums import add_sums, settle_sum, start_sum
from distlion.layout import BLOCK_WORDS, BucketLayout, count_sum_planes
from distlion.votes.roster import Roster

if TYPE_CHECKING:
    from distlion.votes.aggregation import Aggregation


@dataclass(frozen=True)
class RuleSums:
    """Count votes in parts: packed sums of some workers' votes, and the reply to all: bytes only.

    Sums add up in any order, and the reply to the last one is that to all votes, bitwise.

    Attributes:
        rule: A rule with integer votes.
        bucket: The layout of the parameters.
        roster: All voters, with weights of 1.
        coins: The coins of this step; only those that are equal on all workers are used.
    """

    rule: Aggregation
    bucket: BucketLayout
    roster: Roster
    coins: Coins

    def start_sum(self, votes: Tensor, present: Tensor) -> Tensor:
        if self.roster.is_weighted:
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
        planes = rule.reply_planes(self.roster.n_votes)
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

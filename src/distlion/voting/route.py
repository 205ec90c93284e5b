"""How one bucket goes through a step: encode, exchange, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlion.aggregation import Aggregation
from distlion.exchange import (
    Ballot,
    ByteCount,
    Exchange,
    Exchanging,
    Header,
    Link,
    Reply,
)
from distlion.kernels import Coin, Coins, Kernels, ReplyFormat, Segment
from distlion.layout import BLOCK_WORDS, Bucket, BucketShape
from distlion.voting.node_stage import NodeStage


@dataclass(frozen=True)
class Route:
    """What carries one bucket.

    Attributes:
        bucket: Its parameters and their places.
        ballot: What this rank votes for: the bucket, or with nodes its part of it.
        rule: How they are voted on.
        pattern: Which bytes go to whom.
        kernels: The arithmetic.
        link: The network between those who vote.
        node: What happens inside a node; None without nodes.
    """

    bucket: Bucket
    ballot: Bucket
    rule: Aggregation
    pattern: Exchange
    kernels: Kernels
    link: Link
    node: NodeStage | None = None

    @property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return shape_on_wire(self.ballot, self.rule)

    def plan(self) -> ByteCount:
        """Declare what this rank will hand to the network between those who vote."""
        if not self.ballot.slots:
            return ByteCount()
        return self.pattern.plan(self.shape, self.link.rank)

    def encode(self, segments: Sequence[Segment], coins: Coins) -> tuple[Tensor, Tensor]:
        """Encode this worker's vote, (n_blocks, planes, 8); tell which parameters are finite.

        Returns:
            The vote, and (n_params,) bool; both on the device.
        """
        planes = self.rule.vote_planes
        votes = torch.empty(
            (self.ballot.n_blocks, planes, BLOCK_WORDS), dtype=torch.int64, device=self.link.device
        )
        return votes, self.rule.encode(self.kernels, segments, coins, out=votes)

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        """Send the votes and bring back the reply."""
        sent = replace(header, sender=self.link.rank)
        shards = votes.view(-1).view(torch.uint8).view(self.ballot.n_shards, -1)
        ballot = Ballot(sent, shards, torch.tensor(present, dtype=torch.bool))
        return self.pattern.exchange(self.link, self.shape, ballot, _RuleReducer(self, coins))

    def commit(self, segments: Sequence[Segment], reply: Reply, rounding: Coin | None) -> None:
        """Apply the reply and update the momenta."""
        self.kernels.commit(
            segments,
            reply.present.tolist(),
            self.packed_reply(reply.payload),
            reply_format=self.rule.reply_format,
            rounding=rounding,
        )

    def packed_reply(self, payload: Tensor) -> Tensor:
        """Read a reply's bytes, and perhaps padding after them: (blocks, planes, 8) int64."""
        planes = self.rule.reply_planes(self.ballot.n_shards)
        n_bytes = self.ballot.n_shards * self.ballot.shard_bytes(planes)
        return payload.reshape(-1)[:n_bytes].view(torch.int64).view(-1, planes, BLOCK_WORDS)


def shape_on_wire(bucket: Bucket, rule: Aggregation) -> BucketShape:
    """Sizes of a bucket's votes and replies under a rule."""
    return BucketShape(
        n_shards=bucket.n_shards,
        n_params=len(bucket.slots),
        vote_bytes=bucket.shard_bytes(rule.vote_planes),
        reply_bytes=bucket.shard_bytes(rule.reply_planes(bucket.n_shards)),
        has_counts=rule.reply_format is ReplyFormat.COUNT,
    )


@dataclass(frozen=True)
class _RuleReducer:
    """A rule as the pattern sees it: bytes in, bytes out."""

    route: Route
    coins: Coins

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        rule, bucket = self.route.rule, self.route.ballot
        planes = rule.reply_planes(bucket.n_shards)
        packed = (
            votes.contiguous()
            .view(torch.int64)
            .view(votes.shape[0], -1, rule.vote_planes, BLOCK_WORDS)
        )
        out = packed.new_empty(packed.shape[1], planes, BLOCK_WORDS)
        first_block = first_shard * bucket.shard_blocks
        rule.count(self.route.kernels, packed, present, bucket, first_block, self.coins, out=out)
        return out.view(-1).view(torch.uint8)

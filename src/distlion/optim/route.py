"""How one bucket goes through a step: encode, exchange, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from distlion.aggregation import Aggregation
from distlion.exchange import (
    Ballot,
    BucketShape,
    Exchange,
    Header,
    Link,
    Plan,
    Reply,
    choose_exchange,
)
from distlion.kernels import Coin, Coins, Kernels, ReplyFormat, Segment, choose_kernels
from distlion.layout import BLOCK_WORDS, Bucket, Slot, fill_buckets


@dataclass(frozen=True)
class Route:
    """What carries one bucket.

    Attributes:
        bucket: Its parameters and their places.
        rule: How they are voted on.
        pattern: Which bytes go to whom.
        kernels: The arithmetic.
        link: The network.
    """

    bucket: Bucket
    rule: Aggregation
    pattern: Exchange
    kernels: Kernels
    link: Link

    @property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return shape_on_wire(self.bucket, self.rule)

    def plan(self) -> Plan:
        """Declare what this rank will hand to the network."""
        return self.pattern.plan(self.shape, self.link.rank)

    def encode(self, segments: Sequence[Segment], coins: Coins) -> tuple[Tensor, list[bool]]:
        """Encode this worker's vote, (n_blocks, planes, 8); tell which parameters are finite."""
        planes = self.rule.vote_planes
        votes = torch.empty(
            (self.bucket.n_blocks, planes, BLOCK_WORDS), dtype=torch.int64, device=self.link.device
        )
        return votes, self.rule.encode(self.kernels, segments, coins, out=votes)

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Reply:
        """Send the votes and bring back the reply."""
        shards = votes.view(-1).view(torch.uint8).view(self.bucket.n_shards, -1)
        ballot = Ballot(header, shards, torch.tensor(present, dtype=torch.bool))
        return self.pattern.exchange(self.link, self.shape, ballot, _RuleReducer(self, coins))

    def abstain(self, header: Header, coins: Coins) -> Reply:
        """Take part in an exchange without a vote on any parameter."""
        votes, _ = self.encode([], coins)
        header = replace(header, bucket=self.bucket.index)
        return self.exchange(header, votes, [False] * len(self.bucket.slots), coins)

    def commit(self, segments: Sequence[Segment], reply: Reply, rounding: Coin | None) -> None:
        """Apply the reply and update the momenta."""
        self.kernels.commit(
            segments,
            reply.present.tolist(),
            _packed(reply.payload, self.rule.reply_planes(self.bucket.n_shards)),
            reply_format=self.rule.reply_format,
            rounding=rounding,
        )


def build_routes(
    params: Sequence[Tensor],
    slots: Sequence[Slot],
    rules: Sequence[Aggregation],
    links: Mapping[torch.device, Link],
    *,
    exchange: Exchange | Literal["auto"],
    bucket_elements: int,
) -> list[Route]:
    """Put parameters into buckets, and choose what carries each.

    Args:
        params: The trainable parameters, in group order.
        slots: Their places.
        rules: Their rules.
        links: The network of each device.
        exchange: The pattern, or "auto".
        bucket_elements: Coordinates up to which a bucket takes further parameters.
    """
    kinds = [(rule, param.dtype, param.device) for rule, param in zip(rules, params, strict=True)]
    world_size = next(iter(links.values())).world_size if links else 1
    routes = []
    for bucket in fill_buckets(slots, kinds, n_shards=world_size, bucket_elements=bucket_elements):
        rule, _, device = kinds[bucket.members[0]]
        pattern = exchange if exchange != "auto" else choose_exchange(shape_on_wire(bucket, rule))
        routes.append(Route(bucket, rule, pattern, choose_kernels(device), links[device]))
    return routes


def shape_on_wire(bucket: Bucket, rule: Aggregation) -> BucketShape:
    """Sizes of a bucket's votes and replies under a rule."""
    return BucketShape(
        n_shards=bucket.n_shards,
        n_params=len(bucket.slots),
        vote_bytes=bucket.shard_bytes(rule.vote_planes),
        reply_bytes=bucket.shard_bytes(rule.reply_planes(bucket.n_shards)),
        has_counts=rule.reply_format is ReplyFormat.COUNT,
    )


def _packed(payload: Tensor, planes: int) -> Tensor:
    """(..., bytes) uint8 -> (blocks, planes, 8) int64."""
    return payload.reshape(-1).view(torch.int64).view(-1, planes, BLOCK_WORDS)


@dataclass(frozen=True)
class _RuleReducer:
    """A rule as the pattern sees it: bytes in, bytes out."""

    route: Route
    coins: Coins

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        rule, bucket = self.route.rule, self.route.bucket
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

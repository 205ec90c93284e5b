"""A bucket between workers that each vote for whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from distlion.aggregation import Aggregation, FeedbackVote, RuleTally
from distlion.exchange import (
    Ballot,
    ByteCount,
    Exchange,
    Exchanging,
    Header,
    Link,
    Reply,
    gather_flags,
)
from distlion.kernels import Coefficients, Coin, Coins, Kernels, ReplyFormat, Segment
from distlion.layout import BLOCK_WORDS, Bucket, BucketShape
from distlion.voting.diagnostics import ParameterReply
from distlion.voting.feedback import Feedback
from distlion.voting.param import VotingParam
from distlion.voting.staging import bring_down, bring_up, name_failure


@dataclass(frozen=True)
class FlatRoute:
    """Carry one bucket: encode, exchange, commit.

    Attributes:
        bucket: Where its parameters lie.
        params: Those parameters, in order.
        rule: How they are voted on.
        pattern: Which bytes go to whom.
        device: Where they are.
        kernels: The arithmetic there.
        link: The network between those who vote.
        inside: The ranks that hold other shards of the same parameters; None for none.
    """

    bucket: Bucket
    params: tuple[VotingParam, ...]
    rule: Aggregation
    pattern: Exchange
    device: torch.device
    kernels: Kernels
    link: Link
    inside: Link | None = None

    @property
    def own(self) -> tuple[VotingParam, ...]:
        return self.params

    @cached_property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return self.rule.shape(self.bucket)

    @cached_property
    def feedback(self) -> Feedback | None:
        """What votes have said so far, where the rule keeps that."""
        if not self.rule.keeps_estimates:
            return None
        assert isinstance(self.rule, FeedbackVote)  # the only such rule
        return Feedback(self.rule, self.bucket, self.params)

    @cached_property
    def reply_planes(self) -> int:
        """Bits per element of a reply."""
        return self.rule.reply_planes(self.bucket.n_shards)

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """How a reply writes S."""
        return self.rule.reply_format

    def plan(self) -> ByteCount:
        return self.pattern.plan(self.shape, self.link.rank)

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[Sequence[Tensor | None], float, Header]:
        return grads, grad_scale, header

    @property
    def _is_on_host(self) -> bool:
        """Whether parameters are where the wire is."""
        return self.device == self.link.wire_device

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        if self._is_on_host:
            return *self._encode(segments, coins), *more
        with name_failure(self.device, f"votes on bucket {self.bucket.index} were encoded"):
            return bring_down([*self._encode(segments, coins), *more])

    def _encode(self, segments: Sequence[Segment], coins: Coins) -> tuple[Tensor, Tensor]:
        if self.feedback is not None:
            return self.feedback.encode(self.kernels, segments, coins, self.device)
        shape = self.bucket.n_blocks, self.rule.vote_planes, BLOCK_WORDS
        votes = torch.empty(shape, dtype=torch.int64, device=self.device)
        return votes, self.rule.encode(self.kernels, segments, coins, out=votes)

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        if self.inside is None:
            return finite, header
        flags = torch.tensor(finite, dtype=torch.bool) & (not overflow)
        header, gathered = gather_flags(self.inside, flags, header)
        return gathered.all(0).tolist(), header

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        sent = replace(header, sender=self.link.rank)
        shards = votes.view(-1).view(torch.uint8).view(self.bucket.n_shards, -1)
        ballot = Ballot(sent, shards, torch.tensor(present, dtype=torch.bool))
        return self.pattern.exchange(self.link, self.shape, ballot, _RuleReducer(self, coins))

    def commit(
        self,
        segments: Sequence[Segment],
        reply: Reply,
        coefficients: Sequence[Coefficients],
        rounding: Coin | None,
    ) -> None:
        self.kernels.commit(
            segments,
            reply.present.tolist(),
            self.place_reply(reply.payload),
            reply_format=self.reply_format,
            rounding=rounding,
        )
        if self.feedback is not None:
            self.feedback.commit()
        for index, param in enumerate(self.params):
            if segments[index].param is not param.param:
                param.write_back(segments[index].param)

    def gather_estimates(self, link: Link, header: Header) -> Exchanging[Reply]:
        """Send estimates to whom they are counted by, over a link like this one with more time."""
        assert self.feedback is not None
        return self.feedback.gather(link, self.pattern, header)

    def place_reply(self, payload: Tensor) -> Tensor:
        """Return what ``packed_reply`` does, where the parameters are."""
        packed = self.packed_reply(payload)
        return packed if self._is_on_host else bring_up(packed, self.device)

    def packed_reply(self, payload: Tensor) -> Tensor:
        """Read a reply's bytes, and perhaps padding after them: (blocks, planes, 8) int64."""
        n_bytes = self.shape.n_shards * self.shape.reply_bytes
        row = payload.reshape(-1)[:n_bytes]
        return row.view(torch.int64).view(-1, self.reply_planes, BLOCK_WORDS)

    def list_replies(self, reply: Reply) -> list[ParameterReply]:
        packed, present = self.packed_reply(reply.payload), reply.present.tolist()
        return [
            ParameterReply(param.position, param.slot, packed, self.reply_format, present[index])
            for index, param in enumerate(self.params)
        ]


@dataclass(frozen=True)
class _RuleReducer:
    """A rule as the pattern sees it: bytes in, bytes out."""

    route: FlatRoute
    coins: Coins

    @property
    def parts(self) -> RuleTally | None:
        route = self.route
        if route.shape.tally_bytes is None:
            return None
        return RuleTally(route.rule, route.bucket, self.coins)

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        route, bucket = self.route, self.route.bucket
        if route.feedback is not None:
            return route.feedback.reduce(
                route.link.kernels, votes, present, first_shard, self.coins
            )
        packed = (
            votes.contiguous()
            .view(torch.int64)
            .view(votes.shape[0], -1, route.rule.vote_planes, BLOCK_WORDS)
        )
        out = packed.new_empty(packed.shape[1], route.reply_planes, BLOCK_WORDS)
        first_block = first_shard * bucket.shard_blocks
        route.rule.count(
            route.link.kernels, packed, present, bucket, first_block, self.coins, out=out
        )
        return out.view(-1).view(torch.uint8)

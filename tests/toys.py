"""A rule made of existing ops and a pattern made of existing transfers: all that either takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

import matrix
from distlion.kernels import BlockVotes, Coins, Kernels, ReplyFormat, Segment, VoteFormat
from distlion.layout import BucketShape
from distlion.votes import RULES, Aggregation
from distlion.votes.registry import NamedRule
from distlion.wire import PATTERNS, ByteCount, Exchange, Transport
from distlion.wire.all_gather import count_whole_votes, write_whole_vote
from distlion.wire.pattern import Ballot, Cost, Exchanging, Reducer, Reply
from leaning_vote import LeaningVote
from oracle import Rule


@dataclass(frozen=True)
class CautiousVote(Aggregation):
    """Vote with one bit, and stay where workers are divided."""

    vote_planes = 1
    vote_format = VoteFormat.LEVEL
    reply_format = ReplyFormat.TERNARY

    def reply_planes(self, n_workers: int) -> int:
        return 2

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_signs(segments, coins.zero, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_signs(votes, None, out=out)


@dataclass(frozen=True)
class AtOnce(Exchange):
    """Send all votes to everybody at once, however large they are, and count at every rank."""

    def count_transfers(self, n_workers: int) -> int:
        return 1

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        peers = shape.n_shards - 1
        n_bytes = peers * shape.whole_vote_chunk.n_bytes
        return ByteCount(n_bytes, n_bytes, peers)

    def cost(self, shape: BucketShape) -> Cost:
        n = shape.n_shards
        return Cost(
            rounds=1,
            both_ways=True,
            frames_written=1,
            frames_read=n,
            counted_bytes=n * n * shape.vote_bytes,
        )

    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        chunk = write_whole_vote(link, shape, ballot)
        received = link.empty(shape.n_shards, chunk.numel())
        chunks = chunk.expand(shape.n_shards, -1).contiguous()
        under_way = link.all_to_all(received, chunks, step=ballot.header.step)
        yield
        under_way.wait()
        return count_whole_votes(received, link, shape, ballot, reducer)


@contextmanager
def registered() -> Iterator[None]:
    """Give both a name, and the oracle its account of the rule; then undo it.

    Processes are used again, so a worker that registers them has to undo it too.
    """
    RULES["leaning"] = NamedRule(LeaningVote(), "majority vote that leans to the last one")
    matrix.ORACLES[LeaningVote] = lambda rule: Rule("majority", tie="random")
    RULES["cautious"] = NamedRule(CautiousVote(), "majority vote of one bit, 0 on a tie")
    PATTERNS["at-once"] = AtOnce()
    matrix.ORACLES[CautiousVote] = lambda rule: Rule("majority", tie="zero")
    try:
        yield
    finally:
        del RULES["cautious"], PATTERNS["at-once"], matrix.ORACLES[CautiousVote]
        del RULES["leaning"], matrix.ORACLES[LeaningVote]

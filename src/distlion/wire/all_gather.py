"""Every rank gets all votes and counts them itself: one round, but traffic that grows with N."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distlion import faults
from distlion.failures import Status
from distlion.layout import BucketShape
from distlion.wire.frame import read_chunks, write_chunk
from distlion.wire.pattern import (
    Ballot,
    Cost,
    Exchange,
    Exchanging,
    Reducer,
    Reply,
    fire_counted,
    fire_framed,
)
from distlion.wire.transport import ONE_ROUND, ByteCount, Transport
from distlion.wire.verdict import Verdict, judge_chunks


@dataclass(frozen=True)
class AllGather(Exchange):
    """Gather all workers' votes and count all shards at every rank.

    Notes:
        Each rank sends its votes to N - 1 others: N - 1 bits a parameter for one-bit votes. Worth
        it for tiny buckets, where one round costs less than two, and at N = 2, where it sends no
        more than ``AllReduce``. With no reply, a rank cannot tell the others of bytes damaged on
        the way to it alone: that rank raises ``CorruptFrameError`` by itself, and the others lose
        it in their next step.
    """

    def count_transfers(self, n_workers: int) -> int:
        return 1

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        peers = shape.n_shards - 1
        n_bytes = peers * shape.whole_vote_chunk.n_bytes
        return ByteCount(n_bytes, n_bytes, peers)

    def cost(self, shape: BucketShape) -> Cost:
        n = shape.n_shards
        return Cost(
            rounds=ONE_ROUND,
            both_ways=True,
            frames_written=1,
            frames_read=n,
            counted_bytes=n * n * shape.vote_bytes,
            gathered_bytes=shape.whole_vote_chunk.n_bytes,
        )

    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Exchange one bucket: 1 gather votes, 2 count."""
        # 1 gather votes
        chunk = write_whole_vote(link, shape, ballot)
        received = link.empty(shape.n_shards, chunk.numel())
        under_way = link.all_gather(received, chunk, step=ballot.header.step)
        yield under_way
        under_way.wait()

        # 2 count
        return count_whole_votes(received, link, shape, ballot, reducer)


def write_whole_vote(link: Transport, shape: BucketShape, ballot: Ballot) -> Tensor:
    """Put a worker's votes on all shards into one chunk."""
    chunk = link.empty(shape.whole_vote_chunk.n_bytes)
    write_chunk(
        link.kernels,
        chunk,
        shape.whole_vote_chunk,
        ballot.header,
        ballot.present,
        ballot.votes.flatten(),
    )
    if faults.armed:
        fire_framed(link, ballot.header, chunk)
    return chunk


def count_whole_votes(
    received: Tensor, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
) -> Reply:
    """Check all workers' chunks, (workers, n) uint8, and count all shards."""
    chunks = read_chunks(link.kernels, received, shape.whole_vote_chunk, ballot.header)
    if faults.armed:
        fire_counted(link, ballot.header)
    if not chunks.agree:
        nothing = torch.zeros(shape.n_params, dtype=torch.int64, device="cpu")
        return Reply(judge_chunks(chunks, link.ranks), nothing, received)
    voting = chunks.present.bool()
    payload = reducer.reduce(chunks.payloads, voting, 0).view(shape.n_shards, -1)
    present = reducer.count_present(voting)
    verdict = Verdict(Status.OK, ends_epoch=chunks.ends_epoch)
    return Reply(verdict, present, payload, chunks.gradient_digests)

"""A toy pattern that passes on partial counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distlion import faults
from distlion.layout import BucketShape, ChunkShape
from distlion.wire import ByteCount, Exchange, Transport
from distlion.wire.frame import ChunkKind, read_chunks, write_chunk
from distlion.wire.pattern import Ballot, Cost, Exchanging, Reducer, Reply, fire_framed
from distlion.wire.verdict import find_errors, judge_chunks


@dataclass(frozen=True)
class TwoLevels(Exchange):
    """A toy: pairs of ranks count their votes, and pass on what they counted.

    Every rank tallies its pair's votes and settles all shards, so that the code stays short.
    """

    counts_in_parts: ClassVar[bool] = True

    def count_transfers(self, n_workers: int) -> int:
        return 2

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        peers = shape.n_shards - 1
        n_bytes = peers * (shape.whole_vote_chunk.n_bytes + _whole_tally(shape).n_bytes)
        return ByteCount(n_bytes, n_bytes, 2 * peers)

    def cost(self, shape: BucketShape) -> Cost:
        n = shape.n_shards
        return Cost(
            rounds=2,
            both_ways=True,
            frames_written=2,
            frames_read=2 * n,
            counted_bytes=min(n, 2) * n * shape.vote_bytes,
        )

    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Exchange one bucket: 1 gather votes, 2 tally the pair, 3 gather tallies, 4 settle."""
        chunk_shape, kernels = _whole_tally(shape), link.kernels
        parts = reducer.parts
        assert parts is not None  # or there would be no such chunk

        # 1 gather votes
        vote = link.empty(shape.whole_vote_chunk.n_bytes)
        sent = ballot.header
        row = ballot.votes.flatten()
        write_chunk(kernels, vote, shape.whole_vote_chunk, sent, ballot.present, row)
        if faults.armed:
            fire_framed(link, sent, vote)
        votes = link.empty(shape.n_shards, vote.numel())
        under_way = link.all_gather(votes, vote, step=sent.step)
        yield
        under_way.wait()

        # 2 tally the pair
        read = read_chunks(kernels, votes, shape.whole_vote_chunk, sent)
        first = link.rank - link.rank % 2
        pair = slice(first, first + 2)
        header = find_errors(read, replace(sent, kind=ChunkKind.REPLY), link.ranks)
        present, rows = read.present[pair].bool(), range(*pair.indices(shape.n_shards))
        tally = parts.tally(read.payloads[pair], present, 0, rows)
        n_present = reducer.count_present(present, rows)

        # 3 gather tallies
        chunk = link.empty(chunk_shape.n_bytes)
        write_chunk(kernels, chunk, chunk_shape, header, n_present, tally)
        tallies = link.empty(shape.n_shards, chunk.numel())
        under_way = link.all_gather(tallies, chunk, step=sent.step)
        yield
        under_way.wait()

        # 4 settle
        read = read_chunks(kernels, tallies, chunk_shape, header)
        verdict, n_present = judge_chunks(read, link.ranks), read.present[::2].sum(0)
        reply = parts.settle(parts.combine(read.payloads[::2]), n_present, 0)
        return Reply(verdict, n_present, reply.view(shape.n_shards, -1), read.gradient_digests)


def _whole_tally(shape: BucketShape) -> ChunkShape:
    chunk = shape.tally_chunk
    return replace(chunk, payload_bytes=shape.n_shards * chunk.payload_bytes)

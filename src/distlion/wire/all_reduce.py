"""Every rank counts its own shard: traffic per rank does not grow with the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distlion import faults
from distlion.failures import Status
from distlion.layout import BucketShape
from distlion.wire.frame import ChunkKind, read_chunks, write_chunk, write_chunks
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
from distlion.wire.verdict import Verdict, find_errors, judge_chunks


@dataclass(frozen=True)
class AllReduce(Exchange):
    """Scatter shards to their owners, count there, gather the replies.

    Notes:
        Each rank sends (N - 1) / N of its votes and N - 1 times its own shard's reply: 2 (N - 1) /
        N bits a parameter for one bit up and one bit down (Lion Cub, arXiv:2411.16462, 1-bit
        all-reduce).
    """

    def count_transfers(self, n_workers: int) -> int:
        return 2

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        peers = shape.n_shards - 1
        n_bytes = peers * (shape.vote_chunk.n_bytes + shape.reply_chunk.n_bytes)
        return ByteCount(n_bytes, n_bytes, 2 * peers)

    def cost(self, shape: BucketShape) -> Cost:
        n = shape.n_shards
        return Cost(
            rounds=2 * ONE_ROUND,
            both_ways=True,
            frames_written=n + 1,
            frames_read=2 * n,
            counted_bytes=n * shape.vote_bytes,
            gathered_bytes=shape.reply_chunk.n_bytes,
        )

    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Exchange one bucket: 1 scatter shards, 2 count, 3 gather."""
        vote_shape, reply_shape = shape.vote_chunk, shape.reply_chunk

        # 1 scatter shards
        n_bytes = vote_shape.n_bytes
        chunks = torch.empty((shape.n_shards, n_bytes), dtype=torch.uint8, device="cpu")
        write_chunks(link.kernels, chunks, vote_shape, ballot.header, ballot.present, ballot.votes)
        if faults.armed:
            fire_framed(link, ballot.header, chunks)
        received = torch.empty_like(chunks)
        votes_under_way = link.all_to_all(received, chunks, step=ballot.header.step)
        yield votes_under_way
        votes_under_way.wait()

        # 2 count
        votes = read_chunks(link.kernels, received, vote_shape, ballot.header)
        header = ballot.header.amended(
            kind=ChunkKind.REPLY
        )  # all hear whether it ``ends_epoch`` here
        if votes.agree:
            voting = votes.present.bool()
            present = reducer.count_present(voting)
            payload = reducer.reduce(votes.payloads, voting, header.sender)
        else:  # nobody is present
            header = find_errors(votes, header, link.ranks)
            present = torch.zeros(reply_shape.n_params, dtype=torch.int64, device="cpu")
            payload = torch.zeros(reply_shape.payload_bytes, dtype=torch.uint8, device="cpu")
        if faults.armed:
            fire_counted(link, header)

        # 3 gather
        reply = received.new_empty(reply_shape.n_bytes)
        write_chunk(link.kernels, reply, reply_shape, header, present, payload)
        if faults.armed:
            fire_framed(link, header, reply)
        replies = received.new_empty(shape.n_shards, reply_shape.n_bytes)
        replies_under_way = link.all_gather(replies, reply, step=ballot.header.step)
        yield replies_under_way
        replies_under_way.wait()
        read = read_chunks(link.kernels, replies, reply_shape, header)
        present = read.present[0]
        if not read.agree:
            verdict = judge_chunks(read, link.ranks)
        elif bool((read.present != present).any()):
            verdict = Verdict(Status.CORRUPT)
        else:
            verdict = Verdict(Status.OK, ends_epoch=read.ends_epoch)
        return Reply(verdict, present, read.payloads, read.gradient_digests)

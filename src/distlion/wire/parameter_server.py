"""One rank counts everything, as the parameter server of the first paper does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlion import faults
from distlion.failures import Status
from distlion.layout import BucketShape
from distlion.wire.all_gather import count_whole_votes, write_whole_vote
from distlion.wire.frame import ChunkKind, Header, read_chunk, write_chunk
from distlion.wire.pattern import Ballot, Cost, Exchange, Exchanging, Reducer, Reply, fire_framed
from distlion.wire.transport import ONE_ROUND, ByteCount, Transport
from distlion.wire.verdict import Verdict, decode_verdict, encode_verdict, with_verdict

SERVER = 0


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """Send all votes to the group's first rank, which counts them and sends the reply to each.

    Notes:
        The server of Distributed Lion (arXiv:2404.00438, Algorithm 1); the first rank is a worker
        too. It sends and receives N - 1 times as much as every other rank, so its link is the
        bottleneck: use ``AllReduce``, unless that rank has by far the fastest link. If a reply is
        damaged on the way to a single rank, only that rank knows, as with ``AllGather``.
    """

    def count_transfers(self, n_workers: int) -> int:
        return 2

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        vote_bytes, reply_bytes = shape.whole_vote_chunk.n_bytes, shape.whole_reply_chunk.n_bytes
        peers = shape.n_shards - 1
        if rank == SERVER:
            return ByteCount(peers * reply_bytes, peers * vote_bytes, peers)
        return ByteCount(vote_bytes, reply_bytes, 1)

    def cost(self, shape: BucketShape) -> Cost:
        n = shape.n_shards
        return Cost(
            rounds=2 * ONE_ROUND,
            both_ways=False,  # the server has all votes before it sends the first reply
            frames_written=2,
            frames_read=n,
            counted_bytes=n * n * shape.vote_bytes,
        )

    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Exchange one bucket: 1 gather votes, 2 count, 3 scatter the reply."""
        step, is_server = ballot.header.step, link.rank == SERVER

        # 1 gather votes
        chunk = write_whole_vote(link, shape, ballot)
        received = link.empty(shape.n_shards, chunk.numel()) if is_server else None
        votes_under_way = link.gather(received, chunk, step=step)
        yield None
        votes_under_way.wait()

        # 2 count
        counted = None
        if received is not None:
            counted = count_whole_votes(received, link, shape, ballot, reducer)

        # 3 scatter the reply
        reply = link.empty(shape.whole_reply_chunk.n_bytes)
        replies = None
        if counted is not None:
            write_whole_reply(reply, counted, link, shape, ballot.header)
            replies = reply.expand(shape.n_shards, -1).contiguous()
        reply_under_way = link.scatter(reply, replies, step=step)
        yield None
        reply_under_way.wait()
        return counted or read_whole_reply(reply, link, shape, ballot.header, sender=SERVER)


def write_whole_reply(
    out: Tensor, counted: Reply, link: Transport, shape: BucketShape, own: Header
) -> None:
    """Write the reply; after an error, the counter's verdict takes the payload's place.

    Digests of gradients stay with the rank that counted: a reply has no space for all of them.
    """
    chunk_shape, payload = shape.whole_reply_chunk, counted.payload.flatten()
    header = replace(own, kind=ChunkKind.REPLY, gradient_digest=0)
    header = with_verdict(header, counted.verdict)
    if counted.verdict.status is not Status.OK:
        payload = encode_verdict(counted.verdict, chunk_shape.payload_bytes)
    write_chunk(link.kernels, out, chunk_shape, header, counted.present, payload)
    if faults.armed:
        fire_framed(link, header, out)


def read_whole_reply(
    raw: Tensor, link: Transport, shape: BucketShape, own: Header, *, sender: int
) -> Reply:
    """Read the reply that ``write_whole_reply`` wrote on another member of the link."""
    like = replace(own, kind=ChunkKind.REPLY, sender=sender)
    chunk = read_chunk(link.kernels, raw, shape.whole_reply_chunk, like)
    if chunk is None:
        nothing = torch.zeros(shape.n_params, dtype=torch.int64, device="cpu")
        return Reply(Verdict(Status.CORRUPT, (link.ranks[sender],)), nothing, raw)
    verdict = decode_verdict(chunk.header, chunk.payload)
    return Reply(verdict, chunk.present, chunk.payload.view(shape.n_shards, -1))

"""One rank counts everything, as the parameter server of the first paper does."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from distlion.exchange.all_gather import count_whole_votes, whole_vote_shape, write_whole_vote
from distlion.exchange.base import (
    Ballot,
    Exchange,
    Reducer,
    Reply,
    empty,
    fire_framed,
)
from distlion.exchange.frame import (
    ChunkKind,
    ChunkShape,
    Header,
    Status,
    read_chunk,
    write_chunk,
)
from distlion.exchange.link import ByteCount, Link
from distlion.exchange.pipeline import Exchanging
from distlion.exchange.verdict import Verdict
from distlion.layout import BucketShape

SERVER = 0
WITNESS = struct.Struct("<q?")


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """Send all votes to the group's first rank, which counts them and sends the reply to each.

    Notes:
        The server of Distributed Lion (arXiv:2404.00438, Algorithm 1); the first rank is a worker
        too. It sends and receives N - 1 times what every other rank does, so that its link is the
        bottleneck: use ``AllReduce``, unless that rank has by far the fastest link. A reply that is
        damaged on the way to a single rank is known to that rank alone, as with ``AllGather``.
    """

    transfers: ClassVar[int] = 2

    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        vote_bytes, reply_bytes = whole_vote_shape(shape).n_bytes, _reply_shape(shape).n_bytes
        peers = shape.n_shards - 1
        if rank == SERVER:
            return ByteCount(peers * reply_bytes, peers * vote_bytes, peers)
        return ByteCount(vote_bytes, reply_bytes, 1)

    def exchange(
        self, link: Link, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Exchange one bucket: 1 gather votes, 2 count, 3 scatter the reply."""
        step, is_server = ballot.header.step, link.rank == SERVER

        # 1 gather votes
        chunk = write_whole_vote(link, shape, ballot)
        received = empty(link, shape.n_shards, chunk.numel()) if is_server else None
        votes_under_way = link.gather(received, chunk, step=step)
        yield
        votes_under_way.wait()

        # 2 count
        counted = None
        if received is not None:
            counted = count_whole_votes(received, link, shape, ballot, reducer)

        # 3 scatter the reply
        reply = empty(link, _reply_shape(shape).n_bytes)
        replies = None
        if counted is not None:
            _write_reply(reply, counted, link, shape, ballot.header)
            replies = reply.expand(shape.n_shards, -1).contiguous()
        reply_under_way = link.scatter(reply, replies, step=step)
        yield
        reply_under_way.wait()
        return counted or _read_reply(reply, link, shape, ballot.header)


def _reply_shape(shape: BucketShape) -> ChunkShape:
    return ChunkShape(shape.n_params, shape.n_shards * shape.reply_bytes, shape.has_counts)


def _write_reply(out: Tensor, counted: Reply, link: Link, shape: BucketShape, own: Header) -> None:
    """Write the reply; where there was an error, what the server heard takes the payload's place.

    A payload has 64 bytes for every worker, and what is said of one takes 9.
    """
    verdict, chunk_shape = counted.verdict, _reply_shape(shape)
    header = replace(own, kind=ChunkKind.REPLY, status=verdict.status, detail=verdict.detail)
    payload = counted.payload.flatten()
    if verdict.status is Status.OK:
        header = replace(header, detail=0)
    else:
        steps = dict(verdict.steps)
        heard = b"".join(
            WITNESS.pack(steps.get(rank, -1), rank in verdict.culprits) for rank in link.ranks
        )
        row = np.zeros(chunk_shape.payload_bytes, np.uint8)
        row[: len(heard)] = np.frombuffer(heard, np.uint8)
        payload = torch.from_numpy(row)
    write_chunk(out, chunk_shape, header, counted.present, payload)
    fire_framed(link, header, out)


def _read_reply(raw: Tensor, link: Link, shape: BucketShape, own: Header) -> Reply:
    chunk_shape = _reply_shape(shape)
    chunk = read_chunk(raw, chunk_shape, kind=ChunkKind.REPLY, bucket=own.bucket, sender=SERVER)
    nothing = torch.zeros(shape.n_params, dtype=torch.int64)
    if chunk is None:
        return Reply(Verdict(Status.CORRUPT, (link.ranks[SERVER],)), nothing, raw)
    payload = chunk.payload.view(shape.n_shards, -1)
    status = chunk.header.status
    if status is Status.OK:
        return Reply(Verdict(status), chunk.present, payload)
    heard = list(
        WITNESS.iter_unpack(bytes(chunk.payload[: WITNESS.size * shape.n_shards].cpu().numpy()))
    )
    culprits = tuple(rank for rank, (_, blamed) in zip(link.ranks, heard, strict=True) if blamed)
    steps = tuple(
        (rank, step) for rank, (step, _) in zip(link.ranks, heard, strict=True) if step >= 0
    )
    return Reply(Verdict(status, culprits, chunk.header.detail, steps), nothing, payload)

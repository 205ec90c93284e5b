"""Frames beside those of votes, mostly among the ranks of one worker: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from distlion import faults
from distlion.failures import Status
from distlion.layout import ChunkShape
from distlion.wire.frame import ChunkKind, Chunks, Header, read_chunks, write_chunk
from distlion.wire.pattern import Reply, fire_framed
from distlion.wire.transport import Transport
from distlion.wire.verdict import (
    Verdict,
    decode_verdict,
    encode_verdict,
    find_errors,
    judge_chunks,
    verdict_bytes,
    with_verdict,
    worst_of,
)


def share_reply(link: Transport, shape: ChunkShape, reply: Reply, header: Header) -> Reply:
    """Send the reply on this rank's part to its node, and receive the replies on the others.

    Args:
        link: The link between these ranks, each of which votes for one part.
        shape: Sizes of the chunks.
        reply: The reply on this rank's part.
        header: This rank's header.

    Returns:
        ``present`` is (ranks, most pieces) and ``payload`` (ranks, most bytes); entries beyond a
        part's own have no meaning. The verdict joins those of all parts, equal on all ranks.
    """
    verdict = reply.verdict
    present = torch.zeros(shape.n_params, dtype=torch.int64, device="cpu")
    present[: reply.present.numel()] = reply.present
    if verdict.status is Status.OK:
        payload = torch.zeros(shape.payload_bytes, dtype=torch.uint8, device="cpu")
        payload[: reply.payload.numel()] = reply.payload.flatten()
    else:
        payload = encode_verdict(verdict, shape.payload_bytes)
    own = with_verdict(header, verdict)
    read = gather_chunks(link, shape, ChunkKind.NODE_REPLY, own, present, payload)
    lost = read.find_lost(link.ranks)
    if lost:
        joined = Verdict(Status.CORRUPT, lost)
    else:
        joined = worst_of(
            [decode_verdict(part.header, part.payload) for part in read if part is not None]
        )
    return Reply(joined, read.present, read.payloads, reply.gradient_digests)


def swap_payloads(
    link: Transport, shape: ChunkShape, header: Header, present: Tensor, payloads: Iterable[Tensor]
) -> Chunks:
    """Send each rank of a worker a payload of its own, and receive one from each.

    Args:
        link: The link between these ranks.
        shape: Sizes of the chunks.
        header: This rank's header, with their kind.
        present: (n_params,) bool on the CPU, the same for all ranks.
        payloads: For each rank, (payload_bytes,) uint8; one at a time is held.
    """
    chunks = link.empty(link.n_members, shape.n_bytes)
    sent = replace(header, sender=link.rank)
    for chunk, payload in zip(chunks, payloads, strict=True):
        write_chunk(link.kernels, chunk, shape, sent, present, payload)
    if faults.armed and header.kind is ChunkKind.DIRECTION:
        fire_framed(link, header, chunks)
    received = torch.empty_like(chunks)
    link.all_to_all(received, chunks, step=header.step).wait()
    return read_chunks(link.kernels, received, shape, sent)


def gather_flags(link: Transport, flags: Tensor, header: Header) -> tuple[Header, Tensor]:
    """Gather a flag for each parameter of a bucket from every rank of one worker.

    Args:
        link: The link between these ranks.
        flags: (n_params,) bool on the CPU.
        header: This rank's header.

    Returns:
        The header, with the worst error found, and (ranks, n_params) bool on the CPU.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    shape = ChunkShape(flags.numel(), 0)
    read = gather_chunks(link, shape, ChunkKind.FINITE, header, flags, nothing)
    return find_errors(read, header, link.ranks), read.present.bool()


def share_verdict(link: Transport, verdict: Verdict, header: Header, *, n_voters: int) -> Verdict:
    """Share verdicts among the ranks of one worker, and return the worst on all of them.

    Args:
        link: The link between these ranks.
        verdict: This rank's verdict from its peers in other workers.
        header: This rank's header.
        n_voters: Number of workers; a rank knows culprits among its fellow voters and these.
    """
    own = with_verdict(header, verdict)
    shape = ChunkShape(0, verdict_bytes(n_voters + link.n_members))
    payload = encode_verdict(verdict, shape.payload_bytes)
    read = gather_chunks(
        link, shape, ChunkKind.VERDICT, own, torch.zeros(0, dtype=torch.bool, device="cpu"), payload
    )
    found = judge_chunks(read, link.ranks)
    # A header names one culprit; payloads of ranks with the same finding name the others.
    alike = [part for part in read if part is not None and part.header.status is found.status]
    named = {rank for part in alike for rank in decode_verdict(part.header, part.payload).culprits}
    culprits = tuple(sorted({*found.culprits, *named}))
    # Peers at other steps are known to the rank that heard them.
    return replace(found, culprits=culprits, steps=verdict.steps or found.steps)


def gather_chunks(
    link: Transport,
    shape: ChunkShape,
    kind: ChunkKind,
    header: Header,
    present: Tensor,
    payload: Tensor,
) -> Chunks:
    """Send every rank of a link the same chunk, and receive one from each.

    Args:
        link: The link.
        shape: Sizes of the chunks.
        kind: Their kind.
        header: This rank's header.
        present: (n_params,) bool or int64 on the CPU.
        payload: (payload_bytes,) uint8.
    """
    own = link.empty(shape.n_bytes)
    sent = replace(header, kind=kind, sender=link.rank)
    write_chunk(link.kernels, own, shape, sent, present, payload)
    if faults.armed and kind is ChunkKind.SAMPLE:
        fire_framed(link, header, own)
    everybody = link.empty(link.n_members, shape.n_bytes)
    link.all_gather(everybody, own, step=header.step).wait()
    return read_chunks(link.kernels, everybody, shape, sent)

"""A few numbers from every worker to every worker, framed like votes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from distlion.layout import shape_numbers
from distlion.wire.frame import Chunk, ChunkKind, Header
from distlion.wire.node_frames import gather_chunks
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import find_errors


def plan_numbers(n_numbers: int, n_workers: int) -> ByteCount:
    """Declare the bytes that each worker sends in ``gather_numbers``."""
    peers = n_workers - 1
    n_bytes = peers * shape_numbers(n_numbers).n_bytes
    return ByteCount(n_bytes, n_bytes, peers)


def gather_numbers(
    link: Transport, numbers: Sequence[float], header: Header, *, kind: ChunkKind
) -> tuple[Header, list[tuple[float, ...]]]:
    """Gather numbers from every member, in order; a member with a damaged chunk has none."""
    data = struct.pack(f"<{len(numbers)}d", *numbers)
    shape = shape_numbers(len(numbers))
    payload = torch.from_numpy(
        np.frombuffer(data.ljust(shape.payload_bytes, b"\0"), np.uint8).copy()
    )
    nothing = torch.zeros(0, dtype=torch.bool, device="cpu")
    chunks = gather_chunks(link, shape, kind, replace(header, bucket=0), nothing, payload)
    return find_errors(chunks, header, link.ranks), [
        _unpack(chunk, len(numbers)) for chunk in chunks if chunk is not None
    ]


def plan_sample(n_numbers: int, n_workers: int) -> ByteCount:
    """Declare the bytes that each worker sends over ``link`` in ``gather_sample``."""
    return plan_numbers(n_numbers, n_workers) + plan_numbers(0, n_workers)


def gather_sample(
    link: Transport, inside: Transport | None, numbers: Sequence[float], header: Header
) -> tuple[Header, list[tuple[float, ...]]]:
    """Gather a sample and report damage to all: 1 gather, 2 report, 3 report in nodes.

    Args:
        link: The link between the voters.
        inside: The ranks of this node, each of which has another sample; None without nodes.
        numbers: This worker's numbers.
        header: Its header.

    Returns:
        The header, with the worst error that anybody found; each worker's numbers, in rank order.
    """
    # 1 gather
    header, rows = gather_numbers(link, numbers, header, kind=ChunkKind.SAMPLE)
    # 2 report
    header, _ = gather_numbers(link, [], header, kind=ChunkKind.SAMPLE)
    # 3 report in nodes
    if inside is not None:
        header, _ = gather_numbers(inside, [], header, kind=ChunkKind.SAMPLE)
    return header, rows


def _unpack(chunk: Chunk, n_numbers: int) -> tuple[float, ...]:
    row: Tensor = chunk.payload.cpu()
    return struct.unpack_from(f"<{n_numbers}d", bytes(row.numpy()))

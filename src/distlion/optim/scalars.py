"""A few numbers from every worker to every worker, framed like votes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from distlion.exchange import (
    Chunk,
    ChunkShape,
    Header,
    Kind,
    Link,
    Plan,
    empty,
    find_errors,
    read_chunks,
    write_chunk,
)


def plan_numbers(n_numbers: int, n_workers: int) -> Plan:
    """Declare what each worker hands to the network for ``gather_numbers``."""
    peers = n_workers - 1
    n_bytes = peers * shape_numbers(n_numbers).n_bytes
    return Plan(n_bytes, n_bytes, peers)


def shape_numbers(n_numbers: int) -> ChunkShape:
    """Size the chunk of so many doubles."""
    return ChunkShape(0, -(-8 * n_numbers // 64) * 64)


def gather_numbers(
    link: Link, numbers: Sequence[float], header: Header, *, kind: Kind
) -> tuple[Header, list[tuple[float, ...]]]:
    """Gather as many numbers from every member, in order; nothing from whom they got damaged."""
    data = struct.pack(f"<{len(numbers)}d", *numbers)
    shape = shape_numbers(len(numbers))
    payload = torch.from_numpy(
        np.frombuffer(data.ljust(shape.payload_bytes, b"\0"), np.uint8).copy()
    )
    own = empty(link, shape.n_bytes)
    sent = replace(header, kind=kind, bucket=0, sender=link.rank)
    write_chunk(own, shape, sent, torch.zeros(0, dtype=torch.bool), payload)
    everybody = empty(link, link.world_size, shape.n_bytes)
    link.all_gather(everybody, own, step=header.step).wait()
    chunks = read_chunks(everybody, shape, kind=kind, bucket=0)
    return find_errors(chunks, header, link.ranks), [
        _unpack(chunk, len(numbers)) for chunk in chunks if chunk is not None
    ]


def _unpack(chunk: Chunk, n_numbers: int) -> tuple[float, ...]:
    row: Tensor = chunk.payload.cpu()
    return struct.unpack_from(f"<{n_numbers}d", bytes(row.numpy()))

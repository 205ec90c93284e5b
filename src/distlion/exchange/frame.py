"""What stands before every chunk on the wire: who sends what, in which step, and a checksum.

    chunk = header (64 B) | presence bitmap (padded to 64 B) | counts (replies that need them;
    padded to 64 B) | payload

Frames detect accidents: a rank that left out a step, other settings, flipped bits. They are no
defence against an attacker.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from distlion.kernels import choose_kernels

MAGIC = b"DLio"
PROTOCOL_VERSION = 2
FIELDS = struct.Struct("<4sHBBqqQQIIi8x")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
MAX_WORKERS = (1 << 16) - 1


class Kind(IntEnum):
    """What a chunk carries."""

    VOTE = 1
    REPLY = 2
    GRADIENT = 3
    """A worker's gradients, to the ranks of its node."""
    FINITE = 4
    """Which parameters are finite on a rank, to the ranks of its node."""
    NODE_REPLY = 5
    """The reply on one rank's part, to the ranks of its node."""
    NORM = 6
    """Of a gradient, as far as one rank has it."""


class Status(IntEnum):
    """What a worker found; where several did, the highest stands."""

    OK = 0
    NON_FINITE = 1
    SPARSE_GRADIENT = 2
    GRADIENT_CHANGED = 3
    SETTINGS_CHANGED = 4
    CANCELLED = 5
    CONFIG = 6
    STEP = 7
    CORRUPT = 8


@dataclass(frozen=True)
class Header:
    """The fields of a header.

    Attributes:
        kind: Vote or reply.
        step: The sender's step.
        bucket: The bucket it belongs to.
        sender: Rank of the sender in the group that the chunk crosses.
        settings: Digest, unsigned 64 bits, of layout and hyperparameters of this step.
        status: What the sender found.
        culprit: Rank, among all workers, where it was found; -1 for nobody.
        detail: With an OK status, the digest of the sender's raw gradients, or 0; else the position
            among trainable parameters of the one concerned, or -1.
    """

    kind: Kind
    step: int
    bucket: int
    sender: int
    settings: int
    status: Status = Status.OK
    culprit: int = -1
    detail: int = 0


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of a chunk, known to both sides beforehand.

    Attributes:
        n_params: Parameters of the bucket.
        payload_bytes: Bytes of votes or of a reply; a multiple of 64.
        has_counts: Whether it says for each parameter how many workers voted, rather than whether
            any did.
    """

    n_params: int
    payload_bytes: int
    has_counts: bool = False

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of the presence bitmap."""
        return _pad(-(-self.n_params // 8))

    @property
    def counts_bytes(self) -> int:
        """Bytes of the counts, two for each parameter; 0 without."""
        return _pad(2 * self.n_params) if self.has_counts else 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole chunk."""
        return HEADER_BYTES + self.bitmap_bytes + self.counts_bytes + self.payload_bytes


def _pad(n_bytes: int) -> int:
    return -(-n_bytes // 64) * 64


@dataclass(frozen=True)
class Chunk:
    """A chunk that has arrived and was found whole.

    Attributes:
        header: Its header.
        present: (n_params,) int64 on the CPU: how many voted for each parameter (0 or 1 without
            counts).
        payload: (payload_bytes,) uint8, a view of what arrived.
    """

    header: Header
    present: Tensor
    payload: Tensor = field(repr=False)


def write_chunk(
    out: Tensor, shape: ChunkShape, header: Header, present: Tensor, payload: Tensor
) -> None:
    """Fill ``out`` with a chunk.

    Args:
        out: (shape.n_bytes,) uint8. Overwritten.
        shape: Its sizes.
        header: Its header.
        present: (n_params,) integers or bool on the CPU: how many vote for each parameter.
        payload: (payload_bytes,) uint8.
    """
    numbers = present.numpy().astype(np.uint16)
    body = np.zeros(shape.bitmap_bytes + shape.counts_bytes, np.uint8)
    bitmap = np.packbits(numbers != 0, bitorder="little")
    body[: bitmap.size] = bitmap
    if shape.has_counts:
        counts = numbers.astype("<u2").view(np.uint8)
        body[shape.bitmap_bytes : shape.bitmap_bytes + counts.size] = counts
    out[FIELDS.size + CHECKSUM.size :][: body.size] = torch.from_numpy(body)
    out[HEADER_BYTES + body.size :] = payload
    out[: FIELDS.size] = _to_tensor(
        FIELDS.pack(
            MAGIC,
            PROTOCOL_VERSION,
            header.kind,
            header.status,
            header.step,
            header.detail,
            header.settings,
            out.numel(),
            header.bucket,
            header.sender,
            header.culprit,
        )
    )
    out[FIELDS.size : HEADER_BYTES] = _to_tensor(CHECKSUM.pack(_checksum(out)))


def read_chunk(
    chunk: Tensor, shape: ChunkShape, *, kind: Kind, bucket: int, sender: int
) -> Chunk | None:
    """Check a chunk and take it apart; None where it is not what ``sender`` must have sent.

    Step, settings and status are left to the caller: a chunk that carries an error is whole.
    """
    if chunk.numel() < HEADER_BYTES:
        return None
    raw = bytes(chunk[:HEADER_BYTES].cpu().numpy())
    (
        magic,
        version,
        its_kind,
        status,
        step,
        detail,
        settings,
        n_bytes,
        its_bucket,
        its_sender,
        culprit,
    ) = FIELDS.unpack(raw[: FIELDS.size])
    (checksum,) = CHECKSUM.unpack(raw[FIELDS.size :])
    found = (magic, version, its_kind, its_bucket, its_sender, n_bytes)
    expected = (MAGIC, PROTOCOL_VERSION, kind, bucket, sender, shape.n_bytes)
    if found != expected or status > max(Status) or checksum != _checksum(chunk):
        return None
    body = (
        chunk[HEADER_BYTES : HEADER_BYTES + shape.bitmap_bytes + shape.counts_bytes].cpu().numpy()
    )
    if shape.has_counts:
        present = body[shape.bitmap_bytes :].view("<u2")[: shape.n_params].astype(np.int64)
    else:
        bitmap = body[: shape.bitmap_bytes]
        present = np.unpackbits(bitmap, bitorder="little")[: shape.n_params].astype(np.int64)
    header = Header(kind, step, bucket, sender, settings, Status(status), culprit, detail)
    return Chunk(header, torch.from_numpy(present), chunk[shape.n_bytes - shape.payload_bytes :])


def read_chunks(raw: Tensor, shape: ChunkShape, *, kind: Kind, bucket: int) -> list[Chunk | None]:
    """Read one chunk from each rank: (world_size, n_bytes) uint8, in rank order."""
    return [
        read_chunk(chunk, shape, kind=kind, bucket=bucket, sender=sender)
        for sender, chunk in enumerate(raw)
    ]


def with_error(header: Header, status: Status, *, culprit: int, detail: int = -1) -> Header:
    """Put an error into a header, unless it holds a graver one, or one that was found earlier."""
    if status <= header.status:
        return header
    return replace(header, status=status, culprit=culprit, detail=detail)


def find_errors(chunks: Sequence[Chunk | None], own: Header, ranks: Sequence[int]) -> Header:
    """Put the worst of what was received, one chunk from each of ``ranks``, into a header."""
    for rank, chunk in zip(ranks, chunks, strict=True):
        if chunk is None:
            own = with_error(own, Status.CORRUPT, culprit=rank)
        elif chunk.header.step != own.step:
            own = with_error(own, Status.STEP, culprit=rank)
        elif chunk.header.settings != own.settings:
            own = with_error(own, Status.CONFIG, culprit=rank)
        else:
            theirs = chunk.header
            own = with_error(own, theirs.status, culprit=theirs.culprit, detail=theirs.detail)
    return own


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checksum(chunk: Tensor) -> int:
    """CRC-32 of everything but the field that holds it."""
    kernels = choose_kernels(chunk.device)
    return kernels.checksum(chunk[HEADER_BYTES:], kernels.checksum(chunk[: FIELDS.size]))


@dataclass(frozen=True)
class Verdict:
    """What the headers of an exchange say together; equal on ranks that read the same headers.

    Attributes:
        status: The worst finding.
        culprits: Ranks to blame, among all workers; empty where that cannot be told.
        detail: The parameter concerned, as its position among trainable ones; -1 for none in
            particular.
        steps: Rank and step of everybody who was heard.
    """

    status: Status
    culprits: tuple[int, ...] = ()
    detail: int = -1
    steps: tuple[tuple[int, int], ...] = ()


def judge(headers: Sequence[Header], ranks: Sequence[int]) -> Verdict:
    """Draw the verdict out of one header from each member of a link, whose ``ranks`` are given."""
    worst = max(header.status for header in headers)
    steps = tuple(zip(ranks, (header.step for header in headers), strict=True))
    for status, values in (
        (Status.STEP, [header.step for header in headers]),
        (Status.CONFIG, [header.settings for header in headers]),
    ):
        if worst < Status.CORRUPT and len(set(values)) > 1:
            culprits = tuple(ranks[member] for member in minority(values))
            return Verdict(status, culprits, steps=steps)
    blamed = [header for header in headers if header.status == worst and worst]
    culprits = tuple(sorted({header.culprit for header in blamed}))
    first = next((header for header in blamed if header.culprit == culprits[0]), None)
    return Verdict(worst, culprits, first.detail if first else -1, steps)


def minority(values: Sequence[object]) -> tuple[int, ...]:
    """Find the ranks that differ from more than half of all; none without such a majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return ()
    return tuple(rank for rank, other in enumerate(values) if other != value)

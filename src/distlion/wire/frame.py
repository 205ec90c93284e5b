"""The header of every chunk on the wire: its sender, content, step and checksum.

    chunk = header (64 B) | presence bitmap (padded to 64 B) | counts (replies that need them;
    padded to 64 B) | payload

    header, little-endian, byte by byte:
     0  magic             4   "DLio"
     4  version           2   of this protocol
     6  kind              1   ChunkKind
     7  status            1   Status
     8  step              8
    16  gradients         8   of the raw gradients: GRADIENT chunks their scale, a double; all
                              others their digest, or 0
    24  settings          8   digest
    32  n_bytes           8   of the whole chunk
    40  bucket            4
    44  sender            2
    46  cancelled_by_all  1   0 or 1
    47  spare             1   0
    48  culprit           4   -1: nobody
    52  position          4   -1: no parameter in particular
    56  epoch             4   of the roster of voters
    60  checksum          4   CRC-32 of all the rest, the payload included

Frames detect accidents: a rank that left out a step, other settings, flipped bits. They are no
defense against an attacker.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlion.failures import Status
from distlion.kernels.contract import Kernels
from distlion.layout import HEADER_BYTES, ChunkShape

MAGIC = b"DLio"
PROTOCOL_VERSION = 11
FIELDS = struct.Struct("<4sHBBq8sQQIHBxiiI")
CHECKSUM_BYTES = 4
NO_CHECKSUM = bytes(CHECKSUM_BYTES)
DIGEST = struct.Struct("<q")
SCALE = struct.Struct("<d")
# The same for numpy, which reads many at once.
HEADER_TYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("kind", "u1"),
        ("status", "u1"),
        ("step", "<i8"),
        ("gradients", "<i8"),
        ("settings", "<u8"),
        ("n_bytes", "<u8"),
        ("bucket", "<u4"),
        ("sender", "<u2"),
        ("cancelled_by_all", "u1"),
        ("spare", "V1"),
        ("culprit", "<i4"),
        ("position", "<i4"),
        ("epoch", "<u4"),
        ("checksum", "<u4"),
    ]
)
MAX_WORKERS = (1 << 16) - 1


class ChunkKind(IntEnum):
    """The content of a chunk."""

    VOTE = 1
    REPLY = 2
    GRADIENT = 3
    """A worker's gradients, to the ranks of its node."""
    FINITE = 4
    """The parameters that are finite on a rank, to the ranks of its node."""
    NODE_REPLY = 5
    """The reply on one rank's part, to the ranks of its node."""
    NORM = 6
    """The norm of one rank's part of a gradient."""
    SAMPLE = 7
    """A few elements of each parameter of a worker's momenta or directions."""
    VERDICT = 8
    """A rank's findings from its peers, to the other ranks of its worker."""
    SUM = 9
    """The headers of some workers' votes, and the sum of these votes."""
    DIRECTION = 10
    """Pieces of matrices, to and from the rank of a worker that orthogonalizes them."""


WORST_STATUS = int(max(Status))
MAGIC_NUMBER = int.from_bytes(MAGIC, "little")


@dataclass(frozen=True)
class Header:
    """The fields of a header.

    Attributes:
        kind: The content of the chunk.
        step: The sender's step.
        bucket: The bucket that it belongs to.
        sender: Rank of the sender in the group that the chunk crosses.
        settings: Digest, unsigned 64 bits, of layout and hyperparameters of this step.
        status: The sender's finding.
        culprit: Rank, among all workers, that caused it; -1 for nobody.
        position: Number of the parameter that an error concerns, among the trainable ones; -1 for
            none in particular.
        cancelled_by_all: With CANCELLED, whether every worker that the sender has heard from gave
            the step up.
        gradient_digest: Digest, signed 64 bits, of the sender's raw gradients; 0 where none is
            wanted. GRADIENT chunks do not carry it.
        epoch: Epoch of the roster of voters; see ``vote.Roster``.
        grad_scale: Factor for the gradients of a GRADIENT chunk. Other kinds do not carry it.
    """

    kind: ChunkKind
    step: int
    bucket: int
    sender: int
    settings: int
    status: Status = Status.OK
    culprit: int = -1
    position: int = -1
    cancelled_by_all: bool = False
    gradient_digest: int = 0
    grad_scale: float = 1.0
    epoch: int = 0


@dataclass(frozen=True)
class Chunk:
    """A chunk that has arrived intact.

    Attributes:
        header: Its header.
        present: (n_params,) int64 on the CPU: number of votes for each parameter (0 or 1 without
            counts).
        payload: (payload_bytes,) uint8, a view of the received bytes.
    """

    header: Header
    present: Tensor
    payload: Tensor = field(repr=False)


def write_chunk(
    kernels: Kernels,
    out: Tensor,
    shape: ChunkShape,
    header: Header,
    present: Tensor,
    payload: Tensor,
) -> None:
    """Fill ``out`` with a chunk.

    Args:
        kernels: The arithmetic where ``out`` lies.
        out: (shape.n_bytes,) uint8. Overwritten.
        shape: Its sizes.
        header: Its header.
        present: (n_params,) integers or bool on the CPU: number of votes for each parameter.
        payload: (payload_bytes,) uint8.
    """
    write_chunks(kernels, out.unsqueeze(0), shape, header, present, payload)


def write_chunks(
    kernels: Kernels,
    out: Tensor,
    shape: ChunkShape,
    header: Header,
    present: Tensor,
    payloads: Tensor,
) -> None:
    """Fill each row of ``out`` with a chunk; only their payloads differ.

    Args:
        kernels: The arithmetic where ``out`` lies.
        out: (chunks, shape.n_bytes) uint8. Overwritten.
        shape: Their sizes.
        header: Their header.
        present: As for ``write_chunk``.
        payloads: (chunks, payload_bytes) uint8.
    """
    fields = _pack_fields(header, shape.n_bytes)
    body = _pack_presence(shape, present)
    payloads_out = out[:, shape.front_bytes :]
    payloads_out.copy_(payloads)
    start = zlib.crc32(body, zlib.crc32(fields))
    checksums = kernels.checksums(payloads_out, start).cpu().numpy().astype("<u4")
    front = np.frombuffer(fields + NO_CHECKSUM + body, np.uint8)
    fronts = np.repeat(front[None], len(checksums), axis=0)
    fronts[:, FIELDS.size : HEADER_BYTES] = checksums.view(np.uint8).reshape(-1, CHECKSUM_BYTES)
    out[:, : shape.front_bytes] = torch.from_numpy(fronts)


def _pack_fields(header: Header, n_bytes: int) -> bytes:
    """Pack all of a header except its checksum."""
    is_gradient = header.kind is ChunkKind.GRADIENT
    return FIELDS.pack(
        MAGIC,
        PROTOCOL_VERSION,
        header.kind,
        header.status,
        header.step,
        SCALE.pack(header.grad_scale) if is_gradient else DIGEST.pack(header.gradient_digest),
        header.settings,
        n_bytes,
        header.bucket,
        header.sender,
        header.cancelled_by_all,
        header.culprit,
        header.position,
        header.epoch,
    )


def _pack_presence(shape: ChunkShape, present: Tensor) -> bytes:
    """Pack the bitmap, and the counts if there are any."""
    numbers = present.numpy().astype("<u2")
    bitmap = np.packbits(numbers != 0, bitorder="little").tobytes()
    counts = numbers.tobytes() if shape.has_counts else b""
    return bitmap.ljust(shape.bitmap_bytes, b"\0") + counts.ljust(shape.counts_bytes, b"\0")


@dataclass(frozen=True)
class Chunks:
    """One chunk from each member of a link, checked together; as a sequence, None where damaged.

    Attributes:
        fields: (members,) of ``HEADER_TYPE``.
        whole: (members,) bool: whether the chunk is intact and as expected from that member.
        agree: Whether all are whole and without error, with the same step and settings.
        present: (members, n_params) int64 on the CPU: number of votes for each parameter.
        payloads: (members, payload_bytes) uint8, a view of the received bytes.
    """

    fields: np.ndarray[Any, Any]
    whole: np.ndarray[Any, Any]
    agree: bool
    present: Tensor = field(repr=False)
    payloads: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, member: int) -> Chunk | None:
        if not self.whole[member]:
            return None
        return Chunk(_read_header(self.fields[member]), self.present[member], self.payloads[member])

    def __iter__(self) -> Iterator[Chunk | None]:
        return (self[member] for member in range(len(self)))

    @property
    def gradient_digests(self) -> tuple[int, ...]:
        """The digest of raw gradients in each header, for chunks that carry one."""
        return tuple(self.fields["gradients"].tolist())

    @property
    def grad_scales(self) -> tuple[float, ...]:
        """The scale in each header, for GRADIENT chunks."""
        return tuple(self.fields["gradients"].copy().view("<f8").tolist())

    def find_lost(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Find the members with a damaged chunk, by their ``ranks``."""
        return tuple(rank for rank, whole in zip(ranks, self.whole, strict=True) if not whole)


def _read_header(fields: np.void) -> Header:
    is_gradient = fields["kind"] == ChunkKind.GRADIENT
    gradients = fields["gradients"]
    return Header(
        kind=ChunkKind(fields["kind"]),
        step=int(fields["step"]),
        bucket=int(fields["bucket"]),
        sender=int(fields["sender"]),
        settings=int(fields["settings"]),
        status=Status(fields["status"]),
        culprit=int(fields["culprit"]),
        position=int(fields["position"]),
        cancelled_by_all=bool(fields["cancelled_by_all"]),
        gradient_digest=0 if is_gradient else int(gradients),
        grad_scale=float(gradients.view("<f8")) if is_gradient else 1.0,
        epoch=int(fields["epoch"]),
    )


def pack_headers(headers: Sequence[Header]) -> Tensor:
    """Write headers as a payload, (64 * headers,) uint8; the chunk around them has a checksum."""
    rows = b"".join(_pack_fields(header, 0) + NO_CHECKSUM for header in headers)
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8)


def unpack_headers(raw: Tensor) -> list[Header]:
    """Read what ``pack_headers`` wrote."""
    rows = np.ascontiguousarray(raw.cpu().numpy()).view(HEADER_TYPE)
    return [_read_header(row) for row in rows]


def read_chunk(kernels: Kernels, chunk: Tensor, shape: ChunkShape, like: Header) -> Chunk | None:
    """Check and split a chunk; return None if it is not what the sender must have sent.

    Args:
        kernels: The arithmetic where ``chunk`` lies.
        chunk: (n,) uint8.
        shape: Its sizes.
        like: A header with the kind, bucket, epoch and sender that are expected. The caller checks
            step, settings and status: a chunk that carries an error is whole.
    """
    if chunk.numel() != shape.n_bytes:
        return None
    return read_chunks(kernels, chunk.unsqueeze(0), shape, like, senders=[like.sender])[0]


def read_chunks(
    kernels: Kernels,
    raw: Tensor,
    shape: ChunkShape,
    like: Header,
    *,
    senders: Sequence[int] | None = None,
) -> Chunks:
    """Check and split chunks.

    Args:
        kernels: The arithmetic where ``raw`` lies.
        raw: (chunks, shape.n_bytes) uint8.
        shape: Their sizes.
        like: A header with the kind, bucket and epoch that are expected.
        senders: Expected sender of each; None for one from each member of a link, in order.
    """
    fronts = np.ascontiguousarray(raw[:, : shape.front_bytes].cpu().numpy())
    fields = np.ascontiguousarray(fronts[:, :HEADER_BYTES]).view(HEADER_TYPE)[:, 0]
    present = _read_presence(fronts[:, HEADER_BYTES:], shape)
    payloads = raw[:, shape.front_bytes :]
    whole = fields["status"] <= WORST_STATUS
    for name, expected in (
        ("magic", MAGIC_NUMBER),
        ("version", PROTOCOL_VERSION),
        ("kind", int(like.kind)),
        ("bucket", like.bucket),
        ("epoch", like.epoch),
        ("sender", np.arange(len(fields)) if senders is None else np.array(senders)),
        ("n_bytes", shape.n_bytes),
    ):
        whole &= fields[name] == expected
    starts = np.empty(len(fronts), np.int64)
    for member, front in enumerate(fronts):
        starts[member] = zlib.crc32(front[HEADER_BYTES:], zlib.crc32(front[: FIELDS.size]))
    checksums = kernels.checksums(payloads, torch.from_numpy(starts).to(raw.device))
    whole &= fields["checksum"] == checksums.cpu().numpy()
    agree = bool(
        whole.all()
        and not fields["status"].any()
        and (fields["step"] == fields["step"][0]).all()
        and (fields["settings"] == fields["settings"][0]).all()
    )
    return Chunks(fields, whole, agree, present, payloads)


def _read_presence(bodies: np.ndarray[Any, Any], shape: ChunkShape) -> Tensor:
    """Unpack (members, bytes) into (members, n_params) int64."""
    if shape.has_counts:
        counts = np.ascontiguousarray(bodies[:, shape.bitmap_bytes :]).view("<u2")
        present = counts[:, : shape.n_params]
    else:
        present = np.unpackbits(bodies, axis=1, count=shape.n_params, bitorder="little")
    return torch.from_numpy(present.astype(np.int64))

"""Nodes: ranks that share fast links act as one worker, which votes with their mean gradient."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.exchange import (
    Chunk,
    ChunkKind,
    Chunks,
    ChunkShape,
    Header,
    Link,
    Reply,
    Status,
    Verdict,
    empty,
    find_errors,
    read_chunks,
    write_chunk,
)
from distlion.kernels import SCALE_BLOCK_ELEMENTS, Coefficients, Coin, Kernels, ReplyFormat, Segment
from distlion.layout import BLOCK_WORDS, Bucket
from distlion.voting.segments import write_back

PAYLOAD_UNIT_BYTES = 64
# A scale travels in the field of a header that is free where there is no error.
_FLOAT = struct.Struct("<d")
_SCALE = struct.Struct("<q")
PIECE_UNIT_ELEMENTS = SCALE_BLOCK_ELEMENTS
"""Pieces begin where the scale blocks of QuantizedVote do, so that none is cut."""


@dataclass(frozen=True)
class Nodes:
    """Let the ranks of a node act as one worker: only votes of whole nodes cross the network.

    Equation:
        g = (g_0 + ... + g_(L-1)) / L, added in float32 in local-rank order; 0 where a rank has no
        gradient. Votes, ties and rules are then those of N / L workers with these gradients.

    Args:
        size: L, ranks of a node; None takes LOCAL_WORLD_SIZE, which torchrun sets. Ranks of a node
            follow each other: 0 ... L - 1, L ... 2 L - 1, and so on.

    Raises:
        InvalidArgumentError: ``size`` is below 1.
        UnsupportedTypeError: ``size`` is not an integer.

    Notes:
        Each rank keeps the momentum of, and votes for, its part of every parameter only, so that
        ``exp_avg`` in the optimizer's state is flat and holds 1/L of the parameter.
    """

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is None:
            return
        if not isinstance(self.size, int) or isinstance(self.size, bool):
            raise UnsupportedTypeError(f"Nodes(size={self.size!r}): expected an integer or None")
        if self.size < 1:
            raise InvalidArgumentError(f"Nodes(size={self.size}): expected 1 or more")

    def resolve(self, world_size: int) -> int:
        """Return the ranks of a node.

        Raises:
            InvalidArgumentError: It is not known, or the workers are no multiple of it.
        """
        size = self.size
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            if not text.isdecimal() or int(text) < 1:
                raise InvalidArgumentError(
                    f"Nodes() takes its size from LOCAL_WORLD_SIZE, which is {text!r}; start the "
                    "workers with torchrun, or give Nodes(size=...)"
                )
            size = int(text)
        if world_size % size:
            raise InvalidArgumentError(
                f"{world_size} workers cannot be cut into nodes of {size}; expected a multiple"
            )
        return size


@dataclass(frozen=True)
class NodeStage:
    """What happens inside a node, around the vote between nodes, for one bucket.

    Attributes:
        link: The ranks of this node.
        bucket: The whole parameters.
        parts: For each rank of the node, the bucket of the pieces that it votes for.
        pieces: (start, stop) of each piece, for every trainable parameter and every part.
        dtype: That of the bucket's parameters.
        kernels: The arithmetic.
        reply_planes, reply_format: Of the rule.
        has_counts: Whether replies say how many voted.
    """

    link: Link
    bucket: Bucket
    parts: tuple[Bucket, ...]
    pieces: Sequence[Sequence[tuple[int, int]]]
    dtype: torch.dtype
    kernels: Kernels
    reply_planes: int
    reply_format: ReplyFormat
    has_counts: bool

    @property
    def own(self) -> Bucket:
        """The part of this rank."""
        return self.parts[self.link.rank]

    def piece_of(self, row: Tensor, position: int, part: int) -> Tensor:
        """Cut from a flat parameter, or anything of its shape, what a part has of it."""
        start, stop = self.pieces[position][part]
        return row[start:stop]

    def average(
        self, grads: Sequence[Tensor | None], header: Header, *, grad_scale: float = 1.0
    ) -> tuple[list[Tensor | None], float, Header]:
        """Average the node's gradients: 1 scatter pieces, 2 check, 3 add in local-rank order.

        Args:
            grads: For each parameter of the bucket, this rank's gradient, flat; None for none.
            header: This rank's header.
            grad_scale: What gradients are to be multiplied by; ranks may differ in it.

        Returns:
            The mean for each piece of this rank's part, None where no rank has a gradient; what it
            is to be multiplied by; and the header, with the worst that was found.
        """
        # 1 scatter pieces
        most = max(sum(slot.n_elements for slot in part.slots) for part in self.parts)
        shape = ChunkShape(len(self.bucket.slots), _pad(most * self.dtype.itemsize))
        chunks = empty(self.link, self.link.world_size, shape.n_bytes)
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool)
        sent = replace(header, kind=ChunkKind.GRADIENT, sender=self.link.rank)
        if sent.status is Status.OK:
            sent = replace(sent, detail=_SCALE.unpack(_FLOAT.pack(grad_scale))[0])
        for part, chunk in enumerate(chunks):
            payload = self._cut(grads, part, shape.payload_bytes)
            write_chunk(chunk, shape, sent, present, payload)
        received = torch.empty_like(chunks)
        self.link.all_to_all(received, chunks, step=header.step).wait()

        # 2 check
        read = read_chunks(received, shape, kind=ChunkKind.GRADIENT, bucket=header.bucket)
        header = find_errors(read, header, self.link.ranks)
        if header.status is not Status.OK:
            return [None] * len(self.own.slots), 1.0, header

        # 3 add in local-rank order
        rows = [
            (present, row.view(self.dtype))
            for present, row in zip(read.present, read.payloads, strict=True)
        ]
        scales = [_FLOAT.unpack(_SCALE.pack(detail))[0] for detail in read.details]
        return self._add(rows, [scale / scales[0] for scale in scales]), scales[0], header

    def _cut(self, grads: Sequence[Tensor | None], part: int, n_bytes: int) -> Tensor:
        """Put what a part has of all gradients into one row of bytes."""
        n_elements = n_bytes // self.dtype.itemsize
        row = torch.zeros(n_elements, dtype=self.dtype, device=self.link.device)
        at = 0
        for position, grad in zip(self.bucket.members, grads, strict=True):
            start, stop = self.pieces[position][part]
            if grad is not None:
                row[at : at + stop - start] = grad[start:stop]
            at += stop - start
        return row.view(torch.uint8)

    def _add(
        self, rows: Sequence[tuple[Tensor, Tensor]], factors: Sequence[float]
    ) -> list[Tensor | None]:
        """Add pieces in float32, each times its rank's factor."""
        index_of = {position: index for index, position in enumerate(self.bucket.members)}
        means: list[Tensor | None] = []
        at = 0
        for position, slot in zip(self.own.members, self.own.slots, strict=True):
            index = index_of[position]
            total = torch.zeros(slot.n_elements, device=self.link.device)
            for (present, row), factor in zip(rows, factors, strict=True):
                if present[index]:
                    piece = row[at : at + slot.n_elements]
                    total += piece if factor == 1 else piece.float() * factor
            at += slot.n_elements
            nobody = not any(bool(present[index]) for present, _ in rows)
            means.append(None if nobody else total.div_(len(rows)).to(rows[0][1].dtype))
        return means

    def make_segments(
        self,
        params: Sequence[Tensor],
        means: Sequence[Tensor | None],
        state: Mapping[Tensor, Mapping[str, Any]],
        coefficients: Mapping[Tensor, Coefficients],
        grad_scale: float,
    ) -> list[Segment]:
        """Put together what the ops need of this rank's part.

        Args:
            params: All trainable parameters.
            means: As ``average`` returned them.
            state: The optimizer's state, whose ``exp_avg`` holds this rank's pieces.
            coefficients: Hyperparameters.
            grad_scale: As ``average`` returned it.
        """
        segments = []
        for position, slot, mean in zip(self.own.members, self.own.slots, means, strict=True):
            param = params[position]
            row = param.detach().contiguous().view(-1)
            piece = self.piece_of(row, position, self.link.rank)
            hyper = coefficients[param]._replace(grad_scale=grad_scale)
            segments.append(Segment(slot, piece, mean, state[param]["exp_avg"], hyper))
        return segments

    def reply_to_nobody(self, header: Header) -> Reply:
        """Stand in for a reply where this rank has no piece of the bucket."""
        culprits = (header.culprit,) if header.culprit >= 0 else ()
        verdict = Verdict(header.status, culprits, header.detail)
        if header.status is Status.OK:
            verdict = Verdict(Status.OK)
        nothing = torch.zeros(0, dtype=torch.int64)
        return Reply(verdict, nothing, empty(self.link, 0))

    def agree(self, finite: Sequence[bool], header: Header) -> tuple[list[bool], Header]:
        """Tell which parameters of this rank's part are finite on all ranks of the node."""
        known = dict(zip(self.own.members, finite, strict=True))
        flags = torch.tensor([known.get(position, True) for position in self.bucket.members])
        shape = ChunkShape(len(self.bucket.slots), 0)
        read = self._gather(
            shape, ChunkKind.FINITE, header, flags, torch.empty(0, dtype=torch.uint8)
        )
        header = find_errors(read, header, self.link.ranks)
        everywhere = (read.present > 0).all(0)
        by_position = dict(zip(self.bucket.members, everywhere.tolist(), strict=True))
        return [by_position[position] for position in self.own.members], header

    def share(self, reply: Reply, header: Header) -> Reply:
        """Give this part's reply to the node, and take those of the others.

        Returns:
            ``present`` is (parts, most pieces), ``payload`` (parts, most bytes).
        """
        verdict = reply.verdict
        most = max(len(part.slots) for part in self.parts)
        n_bytes = max(part.n_shards * part.shard_bytes(self.reply_planes) for part in self.parts)
        shape = ChunkShape(most, n_bytes, self.has_counts)
        present = torch.zeros(most, dtype=torch.int64)
        present[: len(self.own.slots)] = reply.present
        payload = torch.zeros(n_bytes, dtype=torch.uint8, device=self.link.device)
        content = reply.payload.flatten()
        if verdict.status is not Status.OK:
            content = _spell_verdict(verdict).to(self.link.device)
        payload[: content.numel()] = content
        culprit = verdict.culprits[0] if verdict.culprits else -1
        own = replace(header, status=verdict.status, culprit=culprit, detail=verdict.detail)
        read = self._gather(shape, ChunkKind.NODE_REPLY, own, present, payload)
        lost = read.find_lost(self.link.ranks)
        verdict = (
            Verdict(Status.CORRUPT, lost)
            if lost
            else _judge_parts([chunk for chunk in read if chunk is not None])
        )
        return Reply(verdict, read.present, read.payloads, reply.details)

    def _gather(
        self, shape: ChunkShape, kind: ChunkKind, header: Header, present: Tensor, payload: Tensor
    ) -> Chunks:
        own = empty(self.link, shape.n_bytes)
        sent = replace(header, kind=kind, sender=self.link.rank)
        write_chunk(own, shape, sent, present, payload)
        everybody = empty(self.link, self.link.world_size, shape.n_bytes)
        self.link.all_gather(everybody, own, step=header.step).wait()
        return read_chunks(everybody, shape, kind=kind, bucket=header.bucket)

    def commit(
        self,
        params: Sequence[Tensor],
        segments: Sequence[Segment],
        coefficients: Mapping[Tensor, Coefficients],
        reply: Reply,
        rounding: Coin | None,
    ) -> None:
        """Apply all parts' replies, and move the momentum of this rank's part.

        Args:
            params: Those of the bucket.
            segments: This rank's part.
            coefficients: Hyperparameters.
            reply: As ``share`` returned it.
            rounding: As for the kernels.
        """
        rows = {
            position: param.detach().contiguous().view(-1)
            for position, param in zip(self.bucket.members, params, strict=True)
        }
        by_position = dict(zip(self.bucket.members, params, strict=True))
        for number, part in enumerate(self.parts):
            if not part.slots:
                continue
            pieces = [self.piece_of(rows[position], position, number) for position in part.members]
            packed = reply.payload[number][: part.n_shards * part.shard_bytes(self.reply_planes)]
            apply = self.kernels.apply_reply
            if number == self.link.rank:
                apply = self.kernels.commit
                moved = [
                    segment._replace(param=piece)
                    for segment, piece in zip(segments, pieces, strict=True)
                ]
            else:
                moved = [
                    Segment(
                        slot, piece, None, _untouched(piece), coefficients[by_position[position]]
                    )
                    for slot, piece, position in zip(part.slots, pieces, part.members, strict=True)
                ]
            apply(
                moved,
                reply.present[number][: len(part.slots)].tolist(),
                packed.view(torch.int64).view(-1, self.reply_planes, BLOCK_WORDS),
                reply_format=self.reply_format,
                rounding=rounding,
            )
        for position, param in by_position.items():
            write_back(param, rows[position].view(param.shape))


def _spell_verdict(verdict: Verdict) -> Tensor:
    """Spell culprits and steps as bytes: a payload has 64 for every voter, one needs 16."""
    numbers = [len(verdict.culprits), len(verdict.steps), *verdict.culprits]
    numbers += [number for pair in verdict.steps for number in pair]
    return torch.tensor(numbers, dtype=torch.int32).view(torch.uint8)


def _judge_parts(chunks: Sequence[Chunk]) -> Verdict:
    """Draw one verdict out of those of all parts, equal on all ranks of the node."""
    worst = max(chunk.header.status for chunk in chunks)
    if worst is Status.OK:
        return Verdict(worst)
    culprits: set[int] = set()
    steps: dict[int, int] = {}
    details = []
    for chunk in chunks:
        if chunk.header.status == worst:
            numbers = chunk.payload[: chunk.payload.numel() // 4 * 4].view(torch.int32).tolist()
            n_culprits, n_steps, *rest = numbers
            culprits |= set(rest[:n_culprits])
            pairs = rest[n_culprits : n_culprits + 2 * n_steps]
            steps |= dict(zip(pairs[::2], pairs[1::2], strict=True))
            details.append(chunk.header.detail)
    detail = max(details) if worst is Status.CANCELLED else min(details)
    return Verdict(worst, tuple(sorted(culprits)), detail, tuple(sorted(steps.items())))


def _untouched(piece: Tensor) -> Tensor:
    """Stand in for a momentum that this rank does not keep, and that nothing reads or writes."""
    return torch.empty(piece.shape, dtype=torch.float32, device=piece.device)


def _pad(n_bytes: int) -> int:
    return -(-n_bytes // PAYLOAD_UNIT_BYTES) * PAYLOAD_UNIT_BYTES

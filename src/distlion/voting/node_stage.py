"""Nodes: ranks that share fast links act as one worker, which votes with their mean gradient."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.exchange import Header, Link, NodeFrames, Reply, Status
from distlion.kernels import SCALE_BLOCK_ELEMENTS, Coefficients, Coin, Kernels, ReplyFormat, Segment
from distlion.layout import BLOCK_WORDS, Bucket, BucketShape, shape_node
from distlion.voting.segments import write_back

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
        part_shapes: Sizes of the parts between nodes.
        reply_planes, reply_format: Of the rule.
    """

    link: Link
    bucket: Bucket
    parts: tuple[Bucket, ...]
    pieces: Sequence[Sequence[tuple[int, int]]]
    dtype: torch.dtype
    kernels: Kernels
    part_shapes: tuple[BucketShape, ...]
    reply_planes: int
    reply_format: ReplyFormat

    @functools.cached_property
    def frames(self) -> NodeFrames:
        """What carries bytes among the ranks of the node."""
        shape = shape_node(len(self.bucket.slots), self.parts, self.part_shapes, self.dtype)
        return NodeFrames(self.link, shape)

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
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool)
        header, read = self.frames.scatter_gradients(
            self._cut(grads), present, header, grad_scale=grad_scale
        )

        # 2 check
        if header.status is not Status.OK:
            return [None] * len(self.own.slots), 1.0, header

        # 3 add in local-rank order
        rows = [
            (present, row.view(self.dtype))
            for present, row in zip(read.present, read.payloads, strict=True)
        ]
        scales = read.grad_scales
        return self._add(rows, [scale / scales[0] for scale in scales]), scales[0], header

    def _cut(self, grads: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """Put what each part has of all gradients into one row of bytes."""
        n_elements = self.frames.shape.gradients.payload_bytes // self.dtype.itemsize
        for part in range(len(self.parts)):
            row = torch.zeros(n_elements, dtype=self.dtype, device=self.link.device)
            at = 0
            for position, grad in zip(self.bucket.members, grads, strict=True):
                start, stop = self.pieces[position][part]
                if grad is not None:
                    row[at : at + stop - start] = grad[start:stop]
                at += stop - start
            yield row.view(torch.uint8)

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

    def agree(self, finite: Sequence[bool], header: Header) -> tuple[list[bool], Header]:
        """Tell which parameters of this rank's part are finite on all ranks of the node."""
        known = dict(zip(self.own.members, finite, strict=True))
        flags = torch.tensor([known.get(position, True) for position in self.bucket.members])
        header, gathered = self.frames.gather_flags(flags, header)
        by_position = dict(zip(self.bucket.members, gathered.all(0).tolist(), strict=True))
        return [by_position[position] for position in self.own.members], header

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
            reply: As ``frames.share_reply`` returned it.
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
            shape = self.part_shapes[number]
            packed = reply.payload[number][: shape.n_shards * shape.reply_bytes]
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


def _untouched(piece: Tensor) -> Tensor:
    """Stand in for a momentum that this rank does not keep, and that nothing reads or writes."""
    return torch.empty(piece.shape, dtype=torch.float32, device=piece.device)

"""Nodes: ranks that share fast links act as one worker, each for its piece of every parameter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS, Coefficients, Segment
from distlion.layout import BucketLayout, Slot, shape_node
from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_count
from distlion.step.bucket import Bucket
from distlion.step.cut_matrices import CutMatrices
from distlion.step.param import ALONE, Copies, VotingParam
from distlion.votes.reply import ParameterReply
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.node_frames import gather_flags, share_reply, swap_payloads
from distlion.wire.pattern import Exchanging, Reply
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, find_errors

PIECE_UNIT_ELEMENTS = SCALE_BLOCK_ELEMENTS
"""Unit of the start of pieces: a scale block of QuantizedVote, so that none is cut."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Let the ranks of a node act as one worker: only votes of whole nodes cross the network.

    Equation:
        g = (g_0 + ... + g_(L-1)) / L, added in float32 in local-rank order; 0 where a rank has no
        gradient. Votes, ties and rules are then as with N / L workers that have these gradients;
        ``FeedbackVote`` has scales for each rank's piece.

    Args:
        ranks_per_node: L; None takes LOCAL_WORLD_SIZE, which torchrun sets. Ranks of a node follow
            each other: 0 ... L - 1, L ... 2 L - 1, and so on.

    Raises:
        InvalidArgumentError: ``ranks_per_node`` is below 1.
        UnsupportedTypeError: ``ranks_per_node`` is not an integer.

    Notes:
        Each rank votes for its part of every parameter only, and keeps that part's momentum. So
        ``exp_avg`` and ``estimate`` in the optimizer's state are flat and hold 1/L of it.
    """

    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        keep_as_python(self, "ranks_per_node")
        check_count("Nodes.ranks_per_node", self.ranks_per_node, or_none=True)

    def resolve(self, world_size: int) -> int:
        """Return the number of ranks of a node.

        Raises:
            InvalidArgumentError: It is not known, or the number of workers is not a multiple.
        """
        size = self.ranks_per_node
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            if not text.isdecimal() or int(text) < 1:
                raise InvalidArgumentError(
                    f"Nodes() takes its size from LOCAL_WORLD_SIZE, which is {text!r}; start the "
                    "workers with torchrun, or give Nodes(ranks_per_node=...)"
                )
            size = int(text)
        if world_size % size:
            raise InvalidArgumentError(
                f"{world_size} workers cannot be cut into nodes of {size}; expected a multiple"
            )
        return size


class NodePieces:
    """The division of every parameter into pieces, each with its momentum on one rank of a node.

    A parameter's pieces depend only on it and on earlier parameters, so that adding a param group
    moves no momentum. Without nodes there is one piece, the whole.

    Args:
        size: Ranks of a node.
        part: Number of this rank in its node.
    """

    holds_shards = False
    """False: a node's parameters are whole on each of its ranks."""
    makes_whole = False
    """False, as no parameter is a DTensor; pieces of a node are made whole in its route."""

    def __init__(self, size: int, part: int) -> None:
        self.part = part
        self._size = size
        self._cutter = Cutter(size, PIECE_UNIT_ELEMENTS)
        self._pieces: dict[Tensor, tuple[tuple[int, int], ...]] = {}

    def cut(self, param: Tensor) -> None:
        """Cut another parameter, unless it is cut already."""
        if self._size > 1 and param not in self._pieces:
            self._pieces[param] = self._cutter.cut(param.numel())

    def forget(self, params: Iterable[Tensor]) -> None:
        """Undo the cuts of these last parameters, on which later cuts depend."""
        for param in params:
            self._pieces.pop(param, None)
        self._cutter = Cutter(self._size, PIECE_UNIT_ELEMENTS)
        for param in self._pieces:
            self._cutter.cut(param.numel())

    def of(self, param: Tensor) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of each rank's piece of the flat parameter."""
        return self._pieces.get(param, ((0, param.numel()),))

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the slot of a parameter unchanged, as a bucket has all of it."""
        return slot

    def find_copies(self, param: Tensor) -> Copies:
        """Return ``ALONE``, as each piece is held once."""
        return ALONE

    def momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the parameter's shape, or with nodes the shape of this rank's flat piece."""
        if param not in self._pieces:
            return param.shape
        start, stop = self._pieces[param][self.part]
        return torch.Size([stop - start])

    def take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a saved momentum, or with nodes this rank's piece of it."""
        if exp_avg.shape == self.momentum_shape(param):
            return exp_avg
        start, stop = self._pieces[param][self.part]
        return exp_avg.reshape(-1)[start:stop]

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Return a saved momentum unchanged."""
        return exp_avg

    def sketch(self, param: Tensor, exp_avg: Any) -> Any:
        """Return the same as ``localize``, which asks no other rank."""
        return exp_avg

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Return "", as ``localize`` asks no other rank."""
        return ""

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum unchanged, which is its saved form."""
        return exp_avg


class Cutter:
    """Cut parameters, one after the other, into one piece for each part, of about equal size.

    A parameter's pieces depend only on it and on the parameters cut before it. Parts take turns to
    get the larger pieces.

    Args:
        n_parts: Number of parts.
        unit_elements: Unit of the start of pieces; a multiple of 64.
    """

    def __init__(self, n_parts: int, unit_elements: int) -> None:
        self._n_parts = n_parts
        self._unit_elements = unit_elements
        self._turn = 0

    def cut(self, n_elements: int) -> tuple[tuple[int, int], ...]:
        """Cut the next parameter; return (start, stop) of each part, some of which may be empty."""
        least, more = divmod(-(-n_elements // self._unit_elements), self._n_parts)
        units = [
            least + ((part - self._turn) % self._n_parts < more) for part in range(self._n_parts)
        ]
        self._turn = (self._turn + more) % self._n_parts
        ends = itertools.accumulate(units, initial=0)
        return tuple(itertools.pairwise(min(n_elements, end * self._unit_elements) for end in ends))


class NodeBucket(Bucket):
    """A bucket between nodes: averaged in the node, voted on by nodes, replies shared in the node.

    Each rank of the node votes, with its peers in other nodes, for its part of every parameter. A
    bucket of these pieces carries that vote, between the exchanges inside the node.

    Args:
        layout: The layout of the whole parameters.
        params: The parameters, in order.
        parts: For each rank of the node, the bucket of the pieces that it votes for, which may be
            empty.
        inside: The link between the ranks of this node.
        matrices: The matrices to orthogonalize among the parameters; None for none.
    """

    averages = True
    inside: Transport

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[VotingParam],
        parts: Sequence[Bucket],
        inside: Transport,
        matrices: CutMatrices | None = None,
    ) -> None:
        self._parts, self._part = tuple(parts), parts[inside.rank]
        part = self._part
        super().__init__(
            layout,
            params,
            part.vote,
            part.pattern,
            part.device,
            part.kernels,
            part.link,
            inside=inside,
            matrices=matrices,
        )
        self.own = part.params
        self._index_of = {param.position: index for index, param in enumerate(self.params)}
        self._shape = shape_node(
            len(self.params),
            tuple(each.layout for each in parts),
            tuple(each.vote.shape for each in parts),
            self.params[0].param.dtype,
        )

    @property
    def parts(self) -> Sequence[Bucket]:
        return self._parts

    def plan(self) -> ByteCount:
        return self._part.plan() if self.own else ByteCount()

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[list[Tensor | None], float, Header]:
        """Average the node's gradients: 1 scatter pieces, 2 check, 3 add in local-rank order.

        Equation:
            g = (g_0 + ... + g_(L-1)) / L, added in float32; 0 where a rank has no gradient

        Arguments and returns are as for ``Bucket.average``.
        """
        # 1 scatter pieces
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool, device="cpu")
        sent = replace(header, kind=ChunkKind.GRADIENT, grad_scale=grad_scale)
        rows = self._cut(grads)
        read = swap_payloads(self.inside, self._shape.gradients, sent, present, rows)

        # 2 check
        header = find_errors(read, header, self.inside.ranks)
        if header.status is not Status.OK:
            return [None] * len(self.own), 1.0, header

        # 3 add in local-rank order
        first = read.grad_scales[0]
        factors = [scale / first for scale in read.grad_scales]
        return self._add(read.payloads, read.present.bool(), factors), first, header

    def _cut(self, grads: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """Join each part's pieces of all gradients into one row of bytes."""
        dtype = self.params[0].param.dtype
        n_elements = self._shape.gradients.payload_bytes // dtype.itemsize
        for part in range(len(self._parts)):
            row = torch.zeros(n_elements, dtype=dtype, device=self._part.device)
            at = 0
            for index, param in enumerate(self.params):
                start, stop = param.pieces[part]
                grad = grads[index]
                if grad is not None:
                    row[at : at + stop - start] = grad.view(-1)[start:stop]
                at += stop - start
            yield row.view(torch.uint8).to(self.inside.wire_device)

    def _add(
        self, payloads: Tensor, present: Tensor, factors: Sequence[float]
    ) -> list[Tensor | None]:
        """Add the pieces of this rank's part, each times its rank's factor."""
        dtype = self.params[0].param.dtype
        rows = [payload.view(dtype) for payload in payloads]
        means: list[Tensor | None] = []
        at = 0
        for param in self.own:
            n, index = param.slot.n_elements, self._index_of[param.position]
            total = torch.zeros(n, dtype=torch.float32, device="cpu")
            voters = present[:, index].nonzero().flatten().tolist()
            for rank in voters:
                piece, factor = rows[rank][at : at + n], factors[rank]
                total += piece if factor == 1 else piece.float() * factor
            at += n
            mean = total.div_(len(rows)).to(dtype)
            means.append(mean.to(param.device) if voters else None)
        return means

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        return self._part.encode(segments, coins, *more)

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        flags = torch.ones(len(self.params), dtype=torch.bool, device="cpu")
        for index, param in enumerate(self.own):
            flags[self._index_of[param.position]] = finite[index]
        header, gathered = gather_flags(self.inside, flags, header)
        everywhere = gathered.all(0).tolist()
        return [everywhere[self._index_of[param.position]] for param in self.own], header

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        if self.own:
            reply = yield from self._part.exchange(header, votes, present, coins)
        else:  # so small a bucket that this rank has no piece of it, and waits for its node
            for _ in range(self._part.pattern.count_transfers(self._part.link.n_members)):
                yield None
            nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
            reply = Reply(Verdict.of(header), nothing, self.inside.empty(0))
        return share_reply(self.inside, self._shape.replies, reply, header)

    def commit(self, coefficients: Sequence[Coefficients], rounding: Coin | None) -> None:
        for number, part in enumerate(self._parts):
            if not part.params:
                continue
            # Only this rank's part has its momentum here.
            is_own = number == self.inside.rank
            apply = part.vote.commit if is_own else part.vote.apply
            moved = list(self.segments) if is_own else []
            for index, param in enumerate(part.params):
                if is_own:  # an earlier part may have been written back
                    moved[index] = moved[index]._replace(param=param.local())
                else:
                    moved.append(_without_momentum(param, coefficients[param.group]))
            of_part = self._read_part(number)
            present, payload = of_part.present.tolist(), part.place_reply(of_part.payload)
            apply(self.kernels, moved, present, payload, rounding)
            for index, param in enumerate(part.params):
                param.write_back(moved[index].param)

    def send_rule_state(self, link: Transport, header: Header) -> Exchanging[Reply] | None:
        return self._part.send_rule_state(link, header)

    def list_replies(self) -> list[ParameterReply]:
        return self._part.read_replies(self._read_part(self.inside.rank))

    def list_voted(self) -> list[int]:
        return [
            position
            for number, part in enumerate(self._parts)
            for position in part.read_voted(self._read_part(number))
        ]

    def _read_part(self, number: int) -> Reply:
        """Return the reply on the pieces of one rank of the node."""
        reply = self.reply
        present = reply.present[number][: len(self._parts[number].params)]
        return Reply(reply.verdict, present, reply.payload[number])


def _without_momentum(param: VotingParam, coefficients: Coefficients) -> Segment:
    """Return a segment without a momentum, which another rank keeps."""
    piece = param.local()
    momentum = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
    return Segment(param.slot, piece, None, momentum, coefficients)

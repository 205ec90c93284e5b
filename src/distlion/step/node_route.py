"""A bucket with nodes: each node averages gradients and votes as one worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Kernels, Segment
from distlion.layout import Bucket, shape_node
from distlion.step.cut_matrices import CutMatrices
from distlion.step.flat_route import FlatRoute
from distlion.step.param import VotingParam
from distlion.votes.aggregation import Aggregation
from distlion.votes.reply import ParameterReply
from distlion.wire.frame import Header
from distlion.wire.node_frames import NodeFrames, gather_flags
from distlion.wire.pattern import Exchanging, Reply
from distlion.wire.transport import ByteCount, Transport


@dataclass(frozen=True)
class NodeRoute:
    """Carry one bucket: average in the node, vote between nodes, share replies in the node.

    Each rank of the node votes, with its peers in other nodes, for its part of every parameter. A
    ``FlatRoute`` carries that vote, between the exchanges inside the node.

    Attributes:
        bucket: The bucket of whole parameters.
        params: Its parameters, in order.
        parts: For each rank of the node, the route of the pieces that it votes for, which may be
            empty.
        link: The link between the ranks of this node.
        matrices: The matrices to orthogonalize among the parameters; None for none.
    """

    bucket: Bucket
    params: tuple[VotingParam, ...]
    parts: tuple[FlatRoute, ...]
    link: Transport
    matrices: CutMatrices | None = None

    @cached_property
    def frames(self) -> NodeFrames:
        """The frames that the ranks of the node exchange."""
        buckets = tuple(part.bucket for part in self.parts)
        shapes = tuple(part.vote.shape for part in self.parts)
        dtype = self.params[0].param.dtype
        return NodeFrames(self.link, shape_node(len(self.params), buckets, shapes, dtype))

    @property
    def part(self) -> FlatRoute:
        """The route of this rank's pieces."""
        return self.parts[self.link.rank]

    @property
    def own(self) -> tuple[VotingParam, ...]:
        return self.part.params

    @property
    def rule(self) -> Aggregation:
        return self.part.rule

    @property
    def kernels(self) -> Kernels:
        return self.part.kernels

    @cached_property
    def _index_of(self) -> dict[int, int]:
        """The index of each parameter in ``params``, by its position among the trainable ones."""
        return {param.position: index for index, param in enumerate(self.params)}

    def plan(self) -> ByteCount:
        return self.part.plan() if self.own else ByteCount()

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[Sequence[Tensor | None], float, Header]:
        """Average the node's gradients: 1 scatter pieces, 2 check, 3 add in local-rank order.

        Equation:
            g = (g_0 + ... + g_(L-1)) / L, added in float32; 0 where a rank has no gradient

        Arguments and returns are as for ``Route.average``.
        """
        # 1 scatter pieces
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool, device="cpu")
        header, read = self.frames.scatter_gradients(
            self._cut(grads), present, header, grad_scale=grad_scale
        )

        # 2 check
        if header.status is not Status.OK:
            return [None] * len(self.own), 1.0, header

        # 3 add in local-rank order
        first = read.grad_scales[0]
        factors = [scale / first for scale in read.grad_scales]
        return self._add(read.payloads, read.present, factors), first, header

    def _cut(self, grads: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """Join each part's pieces of all gradients into one row of bytes."""
        dtype = self.params[0].param.dtype
        n_elements = self.frames.shape.gradients.payload_bytes // dtype.itemsize
        for part in range(len(self.parts)):
            row = torch.zeros(n_elements, dtype=dtype, device=self.part.device)
            at = 0
            for index, param in enumerate(self.params):
                start, stop = param.pieces[part]
                grad = grads[index]
                if grad is not None:
                    row[at : at + stop - start] = grad.view(-1)[start:stop]
                at += stop - start
            yield row.view(torch.uint8).to(self.link.wire_device)

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
        return self.part.encode(segments, coins, *more)

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        flags = torch.ones(len(self.params), dtype=torch.bool, device="cpu")
        for index, param in enumerate(self.own):
            flags[self._index_of[param.position]] = finite[index]
        header, gathered = gather_flags(self.link, flags, header)
        everywhere = gathered.all(0).tolist()
        return [everywhere[self._index_of[param.position]] for param in self.own], header

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        if self.own:
            reply = yield from self.part.exchange(header, votes, present, coins)
        else:  # so small a bucket that this rank has no piece of it, and waits for its node
            for _ in range(self.part.pattern.count_transfers(self.part.link.n_members)):
                yield
            reply = self.frames.reply_to_nobody(header)
        return self.frames.share_reply(reply, header)

    def commit(
        self,
        segments: Sequence[Segment],
        reply: Reply,
        coefficients: Sequence[Coefficients],
        rounding: Coin | None,
    ) -> None:
        for number, part in enumerate(self.parts):
            if not part.params:
                continue
            # Only this rank's part has its momentum here.
            is_own = number == self.link.rank
            apply = part.vote.commit if is_own else part.vote.apply
            moved = list(segments) if is_own else []
            for index, param in enumerate(part.params):
                if is_own:  # an earlier part may have been written back
                    moved[index] = moved[index]._replace(param=param.local())
                else:
                    moved.append(_without_momentum(param, coefficients[param.group]))
            of_part = self._read_part(reply, number)
            present, payload = of_part.present.tolist(), part.place_reply(of_part.payload)
            apply(self.kernels, moved, present, payload, rounding)
            for index, param in enumerate(part.params):
                param.write_back(moved[index].param)

    def tell_counters(self, link: Transport, header: Header) -> Exchanging[Reply] | None:
        return self.part.tell_counters(link, header)

    def list_replies(self, reply: Reply) -> list[ParameterReply]:
        return self.part.list_replies(self._read_part(reply, self.link.rank))

    def list_voted(self, reply: Reply) -> list[int]:
        return [
            position
            for number, part in enumerate(self.parts)
            for position in part.list_voted(self._read_part(reply, number))
        ]

    def _read_part(self, reply: Reply, number: int) -> Reply:
        """Return the reply on the pieces of one rank of the node."""
        present = reply.present[number][: len(self.parts[number].params)]
        return Reply(reply.verdict, present, reply.payload[number])


def _without_momentum(param: VotingParam, coefficients: Coefficients) -> Segment:
    """Return a segment without a momentum, which another rank keeps."""
    piece = param.local()
    momentum = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
    return Segment(param.slot, piece, None, momentum, coefficients)

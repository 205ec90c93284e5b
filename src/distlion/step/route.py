"""The interface of a route, which carries one bucket through a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Kernels, Segment
from distlion.layout import BucketLayout
from distlion.step.cut_matrices import CutMatrices
from distlion.step.flat_route import FlatRoute
from distlion.step.param import VotingParam
from distlion.votes.aggregation import Aggregation
from distlion.votes.reply import ParameterReply
from distlion.wire.frame import Header
from distlion.wire.pattern import Exchanging, Reply
from distlion.wire.transport import ByteCount, Transport


class Route(Protocol):
    """The route of one bucket: a ``FlatRoute`` between workers, or a ``NodeRoute`` with nodes."""

    @property
    def bucket(self) -> BucketLayout:
        """The layout of the parameters."""
        ...

    @property
    def params(self) -> tuple[VotingParam, ...]:
        """The parameters of the bucket, in order."""
        ...

    @property
    def own(self) -> tuple[VotingParam, ...]:
        """The parameters that this rank votes for, or with nodes its pieces of them."""
        ...

    @property
    def rule(self) -> Aggregation:
        """The rule of their votes."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The arithmetic."""
        ...

    @property
    def matrices(self) -> CutMatrices | None:
        """The matrices to orthogonalize that are cut over the ranks of this worker, if any."""
        ...

    @property
    def parts(self) -> Sequence[FlatRoute]:
        """The routes of the node's ranks, each for its own pieces; without nodes, this one."""
        ...

    def plan(self) -> ByteCount:
        """Declare the bytes that this rank sends between voters."""
        ...

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[Sequence[Tensor | None], float, Header]:
        """Average gradients inside the node; without nodes, return them unchanged.

        Args:
            grads: For each of ``params``, this rank's gradient; None for none.
            header: This worker's header, with errors found so far.
            grad_scale: Factor for gradients; ranks may differ in it.

        Returns:
            A gradient for each of ``own``, None where nobody has one; its factor; and the header,
            with the worst error found.
        """
        ...

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        """Encode this worker's vote, and copy it to host memory for the network.

        Args:
            segments: The segments to vote with.
            coins: The coins of this step.
            more: Tensors to read at the same time, so that there is one wait for the device.

        Returns:
            (n_shards, vote_bytes) uint8; for each segment whether it is finite, (n,) bool;
            ``more``. All on the CPU.

        Raises:
            DeviceError: The device failed.
        """
        ...

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        """Return for each of ``own`` whether it is finite on all ranks that act as one worker.

        Args:
            finite: Flags of this rank.
            header: This rank's header.
            overflow: Whether a GradScaler has seen an overflow here. Then no shard of this worker
                votes, while a node goes on with the mean of its other ranks.
        """
        ...

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        """Send the votes and return the reply."""
        ...

    def commit(
        self,
        segments: Sequence[Segment],
        reply: Reply,
        coefficients: Sequence[Coefficients],
        rounding: Coin | None,
    ) -> None:
        """Apply the reply to the parameters, and move the momenta that are kept here."""
        ...

    def tell_counters(self, link: Transport, header: Header) -> Exchanging[Reply] | None:
        """Send this rank's rule state to the ranks that count, over a link with a longer timeout.

        Needed if the counters' state no longer follows from earlier votes: after a state was
        loaded, parameters were placed anew, or replicas were repaired. Every rank must call it.

        Returns:
            The exchange; None if the rule, or this rank, keeps no state.
        """
        ...

    def list_replies(self, reply: Reply) -> list[ParameterReply]:
        """List the replies on ``own``."""
        ...

    def list_voted(self, reply: Reply) -> list[int]:
        """List the positions of the parameters of which some worker voted on a piece."""
        ...

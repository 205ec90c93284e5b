"""The interface of a route, which carries one bucket through a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from distlion.aggregation import Aggregation
from distlion.exchange import Exchanging, Header, Reply
from distlion.kernels import Coefficients, Coin, Coins, Kernels, Segment
from distlion.layout import Bucket
from distlion.step.flat_route import FlatRoute
from distlion.step.param import VotingParam
from distlion.transport import ByteCount, Transport
from distlion.vote import ParameterReply


class Route(Protocol):
    """One bucket's way: ``FlatRoute`` between workers, ``NodeRoute`` with nodes around it."""

    @property
    def bucket(self) -> Bucket:
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
        """How they are voted on."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The arithmetic."""
        ...

    @property
    def parts(self) -> Sequence[FlatRoute]:
        """For each rank of the node the route of what it votes for; without nodes, this one."""
        ...

    def plan(self) -> ByteCount:
        """Declare what this rank will hand to the network between those who vote."""
        ...

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[Sequence[Tensor | None], float, Header]:
        """Average gradients inside the node; without nodes, return what was given.

        Args:
            grads: For each of ``params``, this rank's gradient; None for none.
            header: This worker's, with what was found so far.
            grad_scale: What gradients are to be multiplied by; ranks may differ in it.

        Returns:
            A gradient for each of ``own``, None where nobody has one; what it is to be multiplied
            by; and the header, with the worst that was found.
        """
        ...

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        """Encode this worker's vote, and bring it into host memory, where the wire is.

        Args:
            segments: What is voted with.
            coins: Of this step.
            more: Tensors that are to be read with it, so that the device is waited for once.

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
        """Return which of ``own`` are finite on all ranks that act as one worker.

        Args:
            finite: Which are, on this one.
            header: This rank's.
            overflow: Whether a GradScaler has seen one here: then no shard of this worker votes,
                while a node goes on with the mean of its other ranks.
        """
        ...

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        """Send the votes and bring back the reply."""
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
        """Tell those who count what this rank keeps, over a link like this one with more time.

        Needed where that is not what earlier votes over the same link have led to: once a state was
        loaded, parameters were placed anew, or replicas repaired. Every rank must call it.

        Returns:
            The exchange; None where the rule, or this rank, keeps nothing.
        """
        ...

    def list_replies(self, reply: Reply) -> list[ParameterReply]:
        """List the replies on ``own``."""
        ...

"""The interface of all exchange patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from distlion import faults
from distlion.errors import InvalidArgumentError
from distlion.layout import BucketShape
from distlion.wire.frame import Header
from distlion.wire.transport import ByteCount, Transfer, Transport
from distlion.wire.verdict import Verdict

T = TypeVar("T")
Exchanging = Generator[Transfer | None, None, T]
"""An exchange, which yields each transfer before it waits for it, and returns the result.

It yields None where it has waited, or its transfer is not held; see ``Transfer``."""


class PartialReducer(Protocol):
    """A reducer as seen by a pattern that passes on partial sums (a tree, a hierarchy).

    Every reducer of votes with a ``BucketShape.plane_bytes`` is one. However votes are split,
    ``add_sums`` of their sums and then ``settle_sum`` give the reply of ``reduce`` to all votes.
    """

    def start_sum(self, votes: Tensor, present: Tensor) -> Tensor:
        """Turn one worker's votes on all shards into a packed sum, of one vote.

        Args:
            votes: (n_shards * vote_bytes,) uint8.
            present: (n_params,) bool on the CPU.

        Returns:
            (n,) uint8, as many bytes as ``BucketShape.sum_chunk`` has beside the header.

        Raises:
            InvalidArgumentError: Votes have weights.
        """
        ...

    def add_sums(self, first: Tensor, second: Tensor, n_votes: int) -> Tensor:
        """Add two packed sums into one of ``n_votes`` votes, both parts together."""
        ...

    def settle_sum(self, total: Tensor, n_present: Tensor) -> Tensor:
        """Turn the packed sum of all votes into the reply.

        Args:
            total: The sum.
            n_present: (n_params,) int64 on the CPU: number of votes for each parameter.

        Returns:
            (n_shards * reply_bytes,) uint8.
        """
        ...


class Reducer(Protocol):
    """A rule as seen by a pattern: votes in, reply out, both opaque."""

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        """Count votes.

        Args:
            votes: (workers, n_shards * vote_bytes) uint8 in host memory, in rank order.
            present: (workers, n_params) bool on the CPU.
            first_shard: The shard that ``votes`` begin with.

        Returns:
            (n_shards * reply_bytes,) uint8.
        """
        ...

    def count_present(self, present: Tensor) -> Tensor:
        """Count the votes that each parameter gets: a worker has as many as its weight.

        Args:
            present: (workers, n_params) bool on the CPU.

        Returns:
            (n_params,) int64.
        """
        ...


@dataclass(frozen=True)
class Ballot:
    """One worker's part in an exchange.

    Attributes:
        header: Header of its votes; ``kind`` is VOTE.
        votes: (n_shards, vote_bytes) uint8 in host memory.
        present: (n_params,) bool on the CPU: the parameters that it votes for.
    """

    header: Header
    votes: Tensor
    present: Tensor


@dataclass(frozen=True)
class Reply:
    """The result of an exchange.

    Attributes:
        verdict: Errors, if any; after an error nothing may be committed.
        present: (n_params,) int64 on the CPU: number of votes for each parameter; where the rule
            does not need the number, whether there was any.
        payload: (n_shards, reply_bytes) uint8 in host memory; without meaning unless
            the verdict is OK.
        gradient_digests: Digest of each rank's raw gradients, where headers carried one; empty
            where the pattern does not return them.
    """

    verdict: Verdict
    present: Tensor
    payload: Tensor
    gradient_digests: tuple[int, ...] = ()


class Cost(NamedTuple):
    """The cost of one exchange between several workers, apart from its bytes.

    Attributes:
        rounds: Rounds of messages, one after the other, with one for an all-gather.
        both_ways: Whether the busiest rank sends and receives at the same time.
        frames_written: Chunks that the busiest rank frames.
        frames_read: Chunks that the busiest rank checks.
        counted_bytes: Bytes of votes that the busiest rank counts.
        gathered_bytes: Size of the chunk that every rank gathers from every other one; 0 if none.
            Some links pass a large one along a ring (``LinkModel.ring_above_bytes``).
    """

    rounds: int
    both_ways: bool
    frames_written: int
    frames_read: int
    counted_bytes: int
    gathered_bytes: int = 0


class Exchange(ABC):
    """A pattern, which sends bytes between ranks.

    Patterns never look into a payload, and all of them return the same bits. They are frozen
    dataclasses without state; a pattern's ``repr`` rebuilds it.

    A pattern declares its own costs. ``plan`` is exact and tested against what is sent; the cost
    model reads ``cost``. Ranks other than the first and the last may not be busier.
    """

    counts_in_parts: ClassVar[bool] = False
    """True if ranks pass on partial sums; votes of floats, or with weights, have none."""

    @abstractmethod
    def count_transfers(self, n_workers: int) -> int:
        """Count the transfers that an exchange waits for; every rank yields as often."""

    def carries(self, shape: BucketShape, *, weighted: bool = False) -> bool:
        """Return whether votes of such a bucket, perhaps with weights, can travel by it."""
        return not self.counts_in_parts or not (weighted or shape.plane_bytes is None)

    def check_carries(self, shape: BucketShape, rule: object) -> None:
        """Check that votes by a rule can travel by this pattern.

        Raises:
            InvalidArgumentError: A vote is not one integer, and it counts in parts.
        """
        if not self.carries(shape):
            raise InvalidArgumentError(
                f"exchange={self!r} counts votes in parts, and those of {rule!r} are floats, have "
                "scales, or are pairs. Expected a rule whose votes are one integer an element, "
                "such as MajorityVote(); or pass exchange=AllReduce()"
            )

    def list_peers(self, n_workers: int, rank: int) -> list[int]:
        """List the ranks that ``rank`` swaps with, in an order in which all can connect."""
        return []

    @abstractmethod
    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        """Declare the bytes that ``exchange`` on ``rank`` sends for one bucket."""

    def plan_total(self, shape: BucketShape) -> int:
        """Return the bytes that all ranks together hand to the network for one bucket."""
        last = shape.n_shards - 1
        return self.plan(shape, 0).sent_bytes + last * self.plan(shape, last).sent_bytes

    @abstractmethod
    def cost(self, shape: BucketShape) -> Cost:
        """Declare the cost of one bucket of several workers, apart from its bytes."""

    @abstractmethod
    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Send one bucket's votes and return the reply; every rank calls it, in the same order.

        A generator, so that several can take turns: it yields in each round, before it
        waits. A worker that found an error still takes part, and reports it in its header.

        Raises:
            PeerLostError: A peer's connection closed.
            StepTimeoutError: A peer did not answer in time.
        """


def fire_framed(link: Transport, header: Header, chunks: Tensor) -> None:
    """Let a test corrupt bytes before they are sent; called only where ``faults.armed``."""
    faults.fire(rank=link.ranks[link.rank], step=header.step, point="framed", subject=chunks)


def fire_counted(link: Transport, header: Header) -> None:
    """Let a test fail a rank that has all votes, before anybody has its reply.

    Called only where ``faults.armed``.
    """
    faults.fire(rank=link.ranks[link.rank], step=header.step, point="counted", subject=header)

"""What every pattern says: who sends which bytes to whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from distlion import faults
from distlion.exchange.frame import Header
from distlion.exchange.verdict import Verdict
from distlion.layout import BucketShape
from distlion.transport import ByteCount, Transport

T = TypeVar("T")
Exchanging = Generator[None, None, T]
"""An exchange, which yields once its bytes are under way, and returns what came back."""


class PartialReducer(Protocol):
    """What a pattern that passes on partial counts (a tree, a hierarchy) needs of a rule.

    The votes of any workers can be counted apart: however they are split, ``settle`` of what
    ``combine`` makes of their tallies is the reply that ``Reducer.reduce`` gives to all votes.
    """

    def tally(
        self,
        votes: Tensor,
        present: Tensor,
        first_shard: int,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Count the votes of some workers.

        Args:
            votes: As for ``Reducer.reduce``, of these workers.
            present: Likewise.
            first_shard: Likewise.
            rows: Which workers these are, by their places in the link; None for all of them. A
                pattern that leaves it out can count some votes only where each counts once.

        Returns:
            (n_shards * tally_bytes,) uint8.

        Raises:
            InvalidArgumentError: Votes have weights, and it is not clear whose these are.
        """
        ...

    def combine(self, tallies: Tensor) -> Tensor:
        """Add tallies, (parts, n_shards * tally_bytes) uint8, into one."""
        ...

    def settle(self, tally: Tensor, n_present: Tensor, first_shard: int) -> Tensor:
        """Turn the tally of all votes into the reply.

        Args:
            tally: (n_shards * tally_bytes,) uint8.
            n_present: (n_params,) int64 on the CPU: how many voted for each parameter.
            first_shard: The shard that ``tally`` begins with.

        Returns:
            (n_shards * reply_bytes,) uint8.
        """
        ...


class Reducer(Protocol):
    """What a pattern needs of a rule: votes in, reply out, both opaque."""

    @property
    def parts(self) -> PartialReducer | None:
        """How to count in parts; None where ``BucketShape.tally_chunk`` refuses."""
        ...

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

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Count the votes that each parameter gets: a worker has as many as its weight.

        Args:
            present: (workers, n_params) bool on the CPU.
            rows: As for ``PartialReducer.tally``.

        Returns:
            (n_params,) int64.

        Raises:
            InvalidArgumentError: As for ``PartialReducer.tally``.
        """
        ...


@dataclass(frozen=True)
class Ballot:
    """One worker's part in an exchange.

    Attributes:
        header: Header of its votes; ``kind`` is VOTE.
        votes: (n_shards, vote_bytes) uint8 in host memory.
        present: (n_params,) bool on the CPU: what it votes for.
    """

    header: Header
    votes: Tensor
    present: Tensor


@dataclass(frozen=True)
class Reply:
    """What comes back.

    Attributes:
        verdict: What went wrong, if anything: then nothing may be committed.
        present: (n_params,) int64 on the CPU: how many voted for each parameter; where the rule
            does not need the number, whether any did.
        payload: (n_shards, reply_bytes) uint8 in host memory; without meaning unless
            the verdict is OK.
        gradient_digests: Digest of each rank's raw gradients, where headers carried one; empty
            where the pattern does not bring them back.
    """

    verdict: Verdict
    present: Tensor
    payload: Tensor
    gradient_digests: tuple[int, ...] = ()


class Cost(NamedTuple):
    """The cost of one exchange between several workers, beside its bytes.

    Attributes:
        rounds: Rounds of messages, one after the other.
        both_ways: Whether the busiest rank sends and receives at the same time.
        frames_written: Chunks that the busiest rank frames.
        frames_read: Chunks that it checks.
        counted_bytes: Bytes of votes that it counts.
    """

    rounds: int
    both_ways: bool
    frames_written: int
    frames_read: int
    counted_bytes: int


class Exchange(ABC):
    """A pattern: which bytes go to whom.

    Patterns never look into a payload, and all of them return the same bits. They are frozen
    dataclasses without state; a pattern's ``repr`` rebuilds it.

    A pattern declares its own costs. ``plan`` is exact and tested against what is sent; the cost
    model reads ``cost``. Ranks other than the first and the last may not be busier.
    """

    transfers: ClassVar[int]
    """Number of transfers that an exchange waits for."""

    @abstractmethod
    def plan(self, shape: BucketShape, rank: int) -> ByteCount:
        """Declare what ``exchange`` on ``rank`` will hand to the network for one bucket."""

    @abstractmethod
    def cost(self, shape: BucketShape) -> Cost:
        """Declare what one bucket of several workers costs beside its bytes."""

    @abstractmethod
    def exchange(
        self, link: Transport, shape: BucketShape, ballot: Ballot, reducer: Reducer
    ) -> Exchanging[Reply]:
        """Send one bucket's votes and bring back the reply; every rank calls it, in the same order.

        A generator, so that several take turns: it yields in each round, once its bytes are under
        way. A worker that found an error takes part all the same, and says so in its header.

        Raises:
            PeerLostError: A peer's connection closed.
            StepTimeoutError: A peer did not answer in time.
        """


def fire_framed(link: Transport, header: Header, chunks: Tensor) -> None:
    """Let a test break bytes that are about to leave; called where ``faults.armed`` only."""
    faults.fire(rank=link.ranks[link.rank], step=header.step, point="framed", subject=chunks)


def fire_counted(link: Transport, header: Header) -> None:
    """Let a test fail a rank that has everybody's votes, whose reply nobody has yet.

    Called where ``faults.armed`` only.
    """
    faults.fire(rank=link.ranks[link.rank], step=header.step, point="counted", subject=header)

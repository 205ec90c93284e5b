"""The transport interface: the collectives that patterns need, each with a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distlion.errors import StepError
from distlion.failures import FailureKind
from distlion.kernels.reference import Kernels

# 4 hosts: 33 KB at 1 Gbit/s 2.0 ms against 2.7 along the ring, 262 KB at 100 Mbit/s 78 against 68.
MOST_BYTES_AT_ONCE = 64 * 1024
ONE_ROUND = 1
"""Rounds of a collective that starts all its messages at once, as all but large all-gathers do."""


@dataclass(frozen=True)
class ByteCount:
    """Bytes and messages of one rank, without messages to itself.

    Attributes:
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        messages: Chunks sent; small ones may share a message of the network.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    def __add__(self, other: ByteCount) -> ByteCount:
        return ByteCount(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.messages + other.messages,
        )


class Transfer(Protocol):
    """A collective; its output has no meaning before ``wait`` returns, nor may its input change.

    It is under way, or *held*, so that other small ones can join its message: then it begins when
    somebody waits for one of them.
    """

    @property
    def is_held(self) -> bool:
        """True if it has not begun."""
        ...

    def begin(self) -> None:
        """Begin it if it is held, with all that have joined it."""
        ...

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            PeerLostError: A peer's connection closed.
            StepTimeoutError: It did not complete in time.
        """
        ...


class Transport(Protocol):
    """One worker's end of a connection between some workers, its *members*.

    A collective returns a ``Transfer``; several may be under way. All members begin the same ones,
    and wait for them, in the same order. That holds across collectives and swaps too, as all that
    goes to one member may share a connection, and one that nobody wants holds up those behind it.
    Tensors to send lie in ``wire_device``, wherever the
    parameters are: there frames are checked and votes are counted.

    Attributes:
        wire_device: The memory that it carries.
        kernels: The arithmetic there.
        timeout_s: Seconds that one collective may take.
        rank: The place of this worker among the members.
        n_members: Their number.
        ranks: The rank of each member among all workers, which errors name.
        ring_above_bytes: All-gathers of larger chunks take n_members - 1 rounds, along a ring, in
            place of one; None if none do.
        counted: The bytes sent so far; a reader may reset it.
    """

    wire_device: torch.device
    kernels: Kernels
    timeout_s: float
    rank: int
    n_members: int
    ranks: tuple[int, ...]
    ring_above_bytes: int | None
    counted: ByteCount

    def empty(self, *shape: int) -> Tensor:
        """Allocate uninitialized uint8 on the wire's device."""
        ...

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int | None) -> Transfer:
        """Send chunk i to member i; ``out`` and ``chunks`` are (n_members, n) uint8."""
        ...

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int | None) -> Transfer:
        """Send ``chunk`` (n,) to every member; ``out`` is (n_members, n), of the same dtype."""
        ...

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int | None) -> Transfer:
        """Send ``chunk`` (n,) to the first member; only that one gives ``out``, (n_members, n)."""
        ...

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int | None) -> Transfer:
        """Receive ``out`` (n,) from the first member; only that one gives (n_members, n)."""
        ...

    def connect(self, peer: int, *, timeout_s: float | None = None) -> None:
        """Make what ``swap`` with one member needs; both call it, before the first one.

        Args:
            peer: The member.
            timeout_s: Seconds to make it; None: as long as for operations.

        Raises:
            ProcessGroupError: The peer did not come.
        """
        ...

    def swap(self, out: Tensor, chunk: Tensor, *, peer: int, step: int | None) -> Transfer:
        """Send ``chunk`` (n,) to one member and receive ``out`` (m,) from it; n or m may be 0.

        Only the two begin it, and both know n and m. All swaps of two members have one order.
        """
        ...

    def broadcast(self, tensor: Tensor, *, step: int | None, source: int = 0) -> Transfer:
        """Overwrite ``tensor`` with the one of a member; not counted."""
        ...

    def check_present(self, *, step: int | None) -> None:
        """Check that no member has left, before a wait in which that would go unnoticed.

        Raises:
            PeerLostError: A member has left.
        """
        ...

    def failure(self, kind: FailureKind, step: int | None, what: str) -> StepError:
        """Find the ranks that failed, and make the error; the transport is then unusable."""
        ...

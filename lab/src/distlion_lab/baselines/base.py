"""The interface of baselines: a gradient as a payload, and the mean of payloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion_lab.baselines.ring import FLOAT32_BYTES, ring_all_gather_bytes

SCALAR_BYTES = FLOAT32_BYTES
LENGTH_BYTES = 8

State = Mapping[str, Tensor]
"""State of a method for one parameter on one worker, by name."""


class Payload(ABC):
    """One worker's data about one parameter, as sent."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes on the wire, indices included."""

    @abstractmethod
    def to_wire(self) -> Tensor:
        """Return these bytes: (n_bytes,) uint8, numbers in the machine's byte order."""


@dataclass(frozen=True)
class CompressionStep:
    """The inputs of a worker's step, besides its gradient.

    Attributes:
        step: Number of the step, counted from 0.
        n_workers: Number of workers in the average.
        generator: Generator on the gradient's device.
        scalar: () float32, the largest ``measure`` of all workers.
    """

    step: int
    n_workers: int
    generator: torch.Generator
    scalar: Tensor


class Compression(ABC):
    """A method that averages gradients in fewer bytes.

    Methods are frozen dataclasses without state; a method's ``repr`` rebuilds it. They are pure:
    they work on one parameter of one worker, write to no argument, and never communicate. Tensors
    are flat and on one device. Values that are not finite reach all workers, as with an all-reduce.
    """

    @property
    def shares_scalar(self) -> bool:
        """True if workers exchange the scalars of ``measure`` before they compress."""
        return False

    @property
    def gathers(self) -> bool:
        """True if every worker needs all payloads; False if the network can add them."""
        return True

    @property
    def varies(self) -> bool:
        """True if a parameter's payloads differ in length; workers then exchange lengths too."""
        return False

    def create_state(self, n_elements: int, device: torch.device) -> State:
        """Create the state before the first step."""
        return {}

    def measure(self, grad: Tensor) -> Tensor:
        """Return this worker's scalar; ``compress`` gets its maximum over all workers.

        Args:
            grad: (n,) float32. Read only.

        Returns:
            () float32; 0 if no scalar is shared.
        """
        return grad.new_zeros(())

    @abstractmethod
    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        """Compress a gradient into this worker's payload.

        Args:
            grad: (n,) float32. Read only.
            state: State of this parameter on this worker. Read only.
            at: The step.

        Returns:
            The payload and the state of the next step.
        """

    @abstractmethod
    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        """Return the mean of all workers' payloads, added in rank order.

        Returns:
            (n_elements,) float32.
        """

    @abstractmethod
    def reply_bytes(self, payloads: Sequence[Payload], n_elements: int) -> int:
        """Count the bytes in which a server would send the sum to each worker."""

    def uplink_bytes(self, payload: Payload) -> int:
        """Count the bytes that a worker would send to a server, a shared scalar included."""
        return payload.n_bytes + SCALAR_BYTES * self.shares_scalar

    @abstractmethod
    def read(self, wire: Tensor, n_elements: int, *, scalar: Tensor) -> Payload:
        """Rebuild a payload from its bytes.

        Args:
            wire: (n_bytes,) uint8.
            n_elements: Length of the parameter.
            scalar: () float32, the largest ``measure`` of all workers.
        """


def gathered_bytes(compression: Compression, payloads: Sequence[Payload]) -> int:
    """Count the bytes that each worker sends to gather one parameter's payloads in a ring.

    Args:
        compression: The method that made them.
        payloads: Payloads of all workers. Shorter ones are padded to the longest.
    """
    longest = max(payload.n_bytes for payload in payloads)
    own = SCALAR_BYTES * compression.shares_scalar + LENGTH_BYTES * compression.varies + longest
    return ring_all_gather_bytes(own, len(payloads))

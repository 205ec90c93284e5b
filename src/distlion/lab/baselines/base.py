"""What every baseline defines: a gradient as a payload, and the mean of payloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distlion.lab.baselines.ring import FLOAT32_BYTES, ring_all_gather_bytes

SCALAR_BYTES = FLOAT32_BYTES
LENGTH_BYTES = 8

State = Mapping[str, Tensor]
"""What a method keeps from step to step about one parameter on one worker, by name."""


class Payload(ABC):
    """What one worker sends about one parameter."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes on the wire, indices included."""

    @abstractmethod
    def to_wire(self) -> Tensor:
        """Return these bytes: (n_bytes,) uint8, numbers as the machine keeps them."""


class Compression(ABC):
    """A method that averages gradients in fewer bytes.

    Methods are frozen dataclasses without state; a method's ``repr`` rebuilds it. They are pure:
    they work on one parameter of one worker, write to no argument, and never meet a peer. Tensors
    are flat and on one device. What is not finite reaches all workers, as with an all-reduce.
    """

    @property
    def shares_scalar(self) -> bool:
        """Whether workers exchange the scalars of ``measure`` before they compress."""
        return False

    @property
    def gathers(self) -> bool:
        """Whether every worker needs all payloads; False where the network can add them."""
        return True

    @property
    def varies(self) -> bool:
        """Whether payloads of one parameter differ in length, which workers then exchange too."""
        return False

    def create_state(self, n_elements: int, device: torch.device) -> State:
        """Create the state before the first step."""
        return {}

    def measure(self, grad: Tensor) -> Tensor:
        """Return the scalar of this worker, whose maximum over all workers ``compress`` is given.

        Args:
            grad: (n,) float32. Read only.

        Returns:
            () float32, 0 where no scalar is shared.
        """
        return grad.new_zeros(())

    @abstractmethod
    def compress(
        self,
        grad: Tensor,
        state: State,
        *,
        step: int,
        n_workers: int,
        generator: torch.Generator,
        scalar: Tensor,
    ) -> tuple[Payload, State]:
        """Choose what this worker sends.

        Args:
            grad: (n,) float32. Read only.
            state: Of this parameter on this worker. Read only.
            step: Counted from 0.
            n_workers: Workers whose gradients are averaged.
            generator: On the gradient's device.
            scalar: () float32, the largest ``measure`` of all workers.

        Returns:
            The payload and the state of the next step.
        """

    @abstractmethod
    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        """Average the payloads of all workers, added in rank order.

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
            n_elements: Of the parameter.
            scalar: () float32, the largest ``measure`` of all workers.
        """


def gathered_bytes(compression: Compression, payloads: Sequence[Payload]) -> int:
    """Count what each worker sends when payloads of one parameter are gathered in a ring.

    Args:
        compression: What made them.
        payloads: Of all workers. Shorter ones are padded to the longest.
    """
    longest = max(payload.n_bytes for payload in payloads)
    own = SCALAR_BYTES * compression.shares_scalar + LENGTH_BYTES * compression.varies + longest
    return ring_all_gather_bytes(own, len(payloads))

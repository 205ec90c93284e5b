"""The model of a link in two numbers: the cost of a round, and the cost of a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion.wire.overhead import ETHERNET_MTU, payload_share


@dataclass(frozen=True)
class LinkModel:
    """The time to send bytes between the workers that vote.

    Equation:
        T = rounds * latency_s + (messages - rounds) * message_s + 8 * bytes / rate_bit_per_s

    Args:
        latency_s: Seconds that a round (a message to a peer and its arrival, with the work of Gloo
            and the kernel) takes beyond its bytes; 0 or more.
        rate_bit_per_s: Bits of payload that a host can send in a second; above 0.
        full_duplex: Whether it can receive at the same rate meanwhile.
        message_s: Seconds that every further message of a round takes; 0 or more. A measured
            latency includes them already, as it was measured with all peers.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    latency_s: float
    rate_bit_per_s: float
    full_duplex: bool = True
    message_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "message_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidArgumentError(f"LinkModel({name}={value!r}): expected 0 s or more")
        if not 0 < self.rate_bit_per_s < math.inf:
            raise InvalidArgumentError(
                f"LinkModel(rate_bit_per_s={self.rate_bit_per_s!r}): expected a number above 0"
            )

    @classmethod
    def of_line(
        cls,
        rate_bit_per_s: float,
        *,
        latency_s: float,
        message_s: float = 0.0,
        full_duplex: bool = True,
        mtu: int = ETHERNET_MTU,
    ) -> LinkModel:
        """Model an Ethernet link by its nominal rate, less the share of headers."""
        return cls(latency_s, rate_bit_per_s * payload_share(mtu), full_duplex, message_s)

    def transfer_s(self, sent_bytes: float, received_bytes: float) -> float:
        """Return the seconds to send and receive bytes at the same time, without latency."""
        busy_bytes = max(sent_bytes, received_bytes)
        if not self.full_duplex:
            busy_bytes = sent_bytes + received_bytes
        return 8 * busy_bytes / self.rate_bit_per_s

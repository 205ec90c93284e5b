"""The network traffic of an optimizer's steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distlion.wire.transport import ByteCount, Transport


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages that this rank sent to the network, without messages to itself.

    Attributes:
        steps: Number of exchanges, including skipped steps.
        sent_bytes, received_bytes, messages: Totals of all exchanges.
        last_sent_bytes, last_received_bytes, last_messages: Figures of the last exchange.
        bits_per_parameter: Bits sent in the last exchange per trainable element.
        check_sent_bytes: Bytes sent by comparisons of the replicas, which no other figure includes.
            Construction (handshake, broadcast of the initial parameters) is not counted, nor is the
            end of the trial of ``overlap="auto"``, some 100 bytes to each rank, once.
        rule_state_sent_bytes: Bytes of rules' state, sent after a state was loaded or parameters
            were placed anew; no other figure includes them.
        node_sent_bytes: With ``nodes``, bytes sent to ranks of the same node, over its fast links;
            no other figure includes them.
    """

    steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    last_sent_bytes: int = 0
    last_received_bytes: int = 0
    last_messages: int = 0
    bits_per_parameter: float = 0.0
    check_sent_bytes: int = 0
    rule_state_sent_bytes: int = 0
    node_sent_bytes: int = 0

    def add_step(self, step: ByteCount, inside: ByteCount, n_elements: int) -> Traffic:
        """Count one more exchange for ``n_elements`` trainable elements.

        Args:
            step: Traffic between voters.
            inside: Traffic inside the node.
            n_elements: Number of trainable elements.
        """
        return Traffic(
            steps=self.steps + 1,
            sent_bytes=self.sent_bytes + step.sent_bytes,
            received_bytes=self.received_bytes + step.received_bytes,
            messages=self.messages + step.messages,
            last_sent_bytes=step.sent_bytes,
            last_received_bytes=step.received_bytes,
            last_messages=step.messages,
            bits_per_parameter=8.0 * step.sent_bytes / n_elements if n_elements else 0.0,
            check_sent_bytes=self.check_sent_bytes,
            rule_state_sent_bytes=self.rule_state_sent_bytes,
            node_sent_bytes=self.node_sent_bytes + inside.sent_bytes,
        )

    def list_scalars(self) -> dict[str, float]:
        """Return the numbers that loggers show."""
        return {
            "sent_bytes": float(self.last_sent_bytes),
            "sent_bytes_total": float(self.sent_bytes),
            "bits_per_parameter": self.bits_per_parameter,
        }


class TrafficMeter:
    """Count the traffic of an optimizer's steps.

    Attributes:
        traffic: The traffic so far.
        links: The links between voters, and between the ranks of this worker; None for none.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.links: tuple[Transport | None, Transport | None] = (None, None)

    def count_step(self, n_elements: int) -> None:
        """Count the bytes sent over the links since the last call as one more step."""
        counted = [ByteCount(), ByteCount()]
        for index, link in enumerate(self.links):
            if link is not None:
                counted[index], link.counted = link.counted, ByteCount()
        between, inside = counted
        self.traffic = self.traffic.add_step(between, inside, n_elements)

    def count_check(self, sent_bytes: int) -> None:
        """Count a comparison of the replicas."""
        total_bytes = self.traffic.check_sent_bytes + sent_bytes
        self.traffic = replace(self.traffic, check_sent_bytes=total_bytes)

    def count_rule_state(self, sent_bytes: int) -> None:
        """Count an exchange of rules' state."""
        total_bytes = self.traffic.rule_state_sent_bytes + sent_bytes
        self.traffic = replace(self.traffic, rule_state_sent_bytes=total_bytes)

"""The setting of a step: the model, the workers, the links, the machine, the prices."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from distlion.errors import InvalidArgumentError
from distlion.wire import Gloo, LinkModel
from distlion.wire.tcp import Tcp
from distlion_lab.planning.machine import GPU, Machine

MAX_NODES = 100_000
MAX_WIDTH = 1_000_000

NVLINK = LinkModel(latency_s=10e-6, rate_bit_per_s=2.4e12)
"""300 GB/s each way, by NVIDIA's data sheet of the A100; the latency of a small NCCL call."""

PCIE = LinkModel(latency_s=10e-6, rate_bit_per_s=0.2e12)
"""PCIe 4.0 x16: 31.5 GB/s each way on paper, of which 25 GB/s are assumed to arrive."""


class WireModel(NamedTuple):
    """The rounds of a transport of votes, for the cost model.

    Attributes:
        round_share: Seconds of a round in units of one of Gloo's.
        ring_above_bytes: As in ``LinkModel``.
    """

    round_share: float
    ring_above_bytes: int | None


WIRES = {
    "gloo": WireModel(1.0, Gloo.ring_above_bytes),
    "tcp": WireModel(0.5, Tcp.ring_above_bytes),
}
"""A round over own sockets took 0.44 to 0.61 of one of Gloo for 64 bytes, and 0.50 at 50 ms
(``benchmarks/wire_rounds.py``, 2026-11-29)."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything on which a forecast depends.

    Args:
        n_params: Trainable parameters, 1 or more.
        nodes: Machines, 1 to 100,000; each has one link to the others.
        gpus_per_node: Workers that share a node; if more than one, they average their gradients
            inside the node.
        link: The network between nodes; its latency is that of a round of Gloo, a round trip.
        wire: The transport of votes: "gloo", or "tcp" for distlion's own sockets. A round over
            these takes one way, half of the latency, as nobody announces what it sends.
            All-reduce stays with Gloo or NCCL.
        node_link: The network inside a node, for each of its workers.
        compute_s: Seconds of forward and backward in a step; above 0.
        machine: Rates of the arithmetic.
        backward_share: Share of ``compute_s`` that is backward. A backward pass does twice the
            work of the forward pass.
        overlap_share: Share of backward that overlapped communication can hide behind: the
            gradients of the first bucket come first.
        momentum_sync_every: Steps after which workers that vote average their momenta
            (``MomentumSync``); None for never. A forecast is the mean over these steps.
        momentum_sync_bits: Bits of a momentum on the uplink: 32 or 16. Means come back in 32.
        orthogonalized_width: Width of the network, if votes are on orthogonalized directions; 0 if
            they are not. All parameters count as matrices, so the time is an upper bound.
        price_per_gpu_hour: Price of one worker for an hour.
        price_per_gb: Price of 10^9 bytes that a node sends.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    n_params: int
    nodes: int
    link: LinkModel
    compute_s: float
    wire: str = "gloo"
    gpus_per_node: int = 1
    node_link: LinkModel = NVLINK
    machine: Machine = GPU
    backward_share: float = 2 / 3
    overlap_share: float = 0.9
    momentum_sync_every: int | None = None
    momentum_sync_bits: int = 32
    orthogonalized_width: int = 0
    price_per_gpu_hour: float = 0.0
    price_per_gb: float = 0.0

    def __post_init__(self) -> None:
        self._check("n_params", 1 <= self.n_params < 1 << 53, "1 to 2^53")
        self._check("nodes", 1 <= self.nodes <= MAX_NODES, f"1 to {MAX_NODES:,}")
        self._check("gpus_per_node", 1 <= self.gpus_per_node <= 1024, "1 to 1,024")
        self._check("compute_s", 0 < self.compute_s < math.inf, "a number of seconds above 0")
        self._check(
            "momentum_sync_every",
            self.momentum_sync_every is None or self.momentum_sync_every >= 1,
            "1 or more",
        )
        self._check("wire", self.wire in WIRES, "gloo or tcp")
        self._check("momentum_sync_bits", self.momentum_sync_bits in (16, 32), "16 or 32")
        width = self.orthogonalized_width
        self._check("orthogonalized_width", 0 <= width <= MAX_WIDTH, f"0 to {MAX_WIDTH:,}")
        for name in ("backward_share", "overlap_share"):
            self._check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("price_per_gpu_hour", "price_per_gb"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "0 or more")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def hideable_s(self) -> float:
        """Seconds of communication that overlap can hide."""
        return self.overlap_share * self.backward_share * self.compute_s

    @property
    def own_params(self) -> int:
        """Parameters for which one worker of a node votes."""
        return -(-self.n_params // self.gpus_per_node)

    @property
    def worker_link(self) -> LinkModel:
        """A worker's share of its node's link, for its votes."""
        wire = WIRES[self.wire]
        return replace(
            self.link,
            latency_s=self.link.latency_s * wire.round_share,
            rate_bit_per_s=self.link.rate_bit_per_s / self.gpus_per_node,
            ring_above_bytes=wire.ring_above_bytes,
        )

    def with_rate(self, rate_bit_per_s: float) -> Scenario:
        """Return the scenario with another rate between nodes."""
        return replace(self, link=replace(self.link, rate_bit_per_s=rate_bit_per_s))

    def with_nodes(self, nodes: int) -> Scenario:
        """Return the scenario with another number of nodes."""
        return replace(self, nodes=nodes)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)

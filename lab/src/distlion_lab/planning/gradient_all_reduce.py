"""A step by all-reduce, overlapped with backward as DistributedDataParallel does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.forecast import Forecast, Load, make_forecast
from distlion_lab.planning.scenario import Scenario

DDP_BUCKET_BYTES = 25 * 1024 * 1024
"""``bucket_cap_mb`` of DistributedDataParallel, in float32 gradients."""

_GRAD_BYTES = 4


@dataclass(frozen=True)
class GradientAllReduce:
    """Sum gradients over all workers, then take a step of Lion.

    Args:
        bits: 32, or 16 as with DDP's ``fp16_compress_hook``.
        algorithm: "ring" takes 2 (N - 1) rounds, as in Gloo and, for large messages, NCCL. "tree"
            takes 2 ceil(log2 N) (recursive halving and doubling), so it scales.

    Raises:
        InvalidArgumentError: A value is none of these.
    """

    bits: Literal[16, 32] = 32
    algorithm: Literal["ring", "tree"] = "ring"

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise InvalidArgumentError(f"AllReduce(bits={self.bits!r}): expected 16 or 32")
        if self.algorithm not in ("ring", "tree"):
            raise InvalidArgumentError(
                f"AllReduce(algorithm={self.algorithm!r}): expected 'ring' or 'tree'"
            )

    @property
    def name(self) -> str:
        """Name of the baseline in tables."""
        return f"fp{self.bits} all-reduce"

    def bits_sent(self, n_workers: int) -> float:
        """Return the bits that a rank sends for each parameter: 2 (N - 1) / N of ``bits``."""
        return 2 * (n_workers - 1) / n_workers * self.bits

    def count_rounds(self, n_workers: int) -> int:
        """Count the sequential rounds of one all-reduce."""
        if self.algorithm == "ring":
            return 2 * (n_workers - 1)
        return 2 * math.ceil(math.log2(n_workers))


BASELINES: tuple[GradientAllReduce, ...] = (
    GradientAllReduce(32, "ring"),
    GradientAllReduce(32, "tree"),
    GradientAllReduce(16, "ring"),
    GradientAllReduce(16, "tree"),
)


def forecast_all_reduce(scenario: Scenario, baseline: GradientAllReduce) -> Forecast:
    """Forecast a step by all-reduce; inside a node, gradients are reduce-scattered and gathered."""
    sent_bytes = scenario.n_params * baseline.bits_sent(scenario.nodes) / 8
    n_buckets = -(-scenario.n_params * _GRAD_BYTES // DDP_BUCKET_BYTES)
    between_s = n_buckets * baseline.count_rounds(scenario.nodes) * scenario.link.latency_s
    between_s += scenario.link.transfer_s(sent_bytes, sent_bytes)
    peers, inside = scenario.gpus_per_node - 1, scenario.node_link
    inside_bytes = 2 * scenario.own_params * peers * baseline.bits / 8
    inside_s = 2 * n_buckets * peers * inside.latency_s
    inside_s += inside.transfer_s(inside_bytes, inside_bytes)
    communication_s = between_s + inside_s
    load = Load(
        sent_bytes=sent_bytes,
        total_sent_bytes=scenario.nodes * sent_bytes,
        arithmetic_s=_arithmetic_s(scenario, baseline),
        communication_s=communication_s,
        last_bucket_s=communication_s / n_buckets,
        processor_s=sent_bytes / scenario.gpus_per_node * scenario.machine.gradient_wire_s_per_byte,
    )
    return make_forecast(
        scenario,
        load,
        method=baseline.name,
        pattern=baseline.algorithm,
        votes=False,
        overlap=True,
    )


def _arithmetic_s(scenario: Scenario, baseline: GradientAllReduce) -> float:
    """Return the seconds of Lion, of the casts to 16 bits and back, and of the additions."""
    machine, n = scenario.machine, scenario.n_params
    arithmetic_s = machine.commit_s(n, n, 0)
    workers = scenario.nodes * scenario.gpus_per_node
    if workers == 1:
        return arithmetic_s
    if baseline.bits == 16:
        arithmetic_s += machine.pass_s(2 * n * (_GRAD_BYTES + 2))
    # For every number that arrives in the reduce-scatter, two are read and one is written.
    return arithmetic_s + machine.pass_s((workers - 1) / workers * n * 3 * baseline.bits / 8)

"""The cost of an exchange: a link in two numbers, and the best pattern."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlion.errors import InvalidArgumentError
from distlion.layout import BucketShape
from distlion.wire.all_reduce import AllReduce
from distlion.wire.pattern import Cost, Exchange
from distlion.wire.registry import PATTERNS


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
        ring_above_bytes: An all-gather passes larger chunks along a ring, in one round less than
            there are workers, as Gloo does (gloo/allgather.cc); smaller ones take one round. 0 or
            more. None for a link without rings, such as one of distlion's own sockets.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    latency_s: float
    rate_bit_per_s: float
    full_duplex: bool = True
    message_s: float = 0.0
    ring_above_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "message_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidArgumentError(f"LinkModel({name}={value!r}): expected 0 s or more")
        if not 0 < self.rate_bit_per_s < math.inf:
            raise InvalidArgumentError(
                f"LinkModel(rate_bit_per_s={self.rate_bit_per_s!r}): expected a number above 0"
            )
        if self.ring_above_bytes is not None and self.ring_above_bytes < 0:
            raise InvalidArgumentError(
                f"LinkModel(ring_above_bytes={self.ring_above_bytes!r}): expected 0 bytes or more"
            )

    def count_rounds(self, cost: Cost, n_workers: int) -> int:
        """Return the rounds of an exchange on this link."""
        least = self.ring_above_bytes
        is_ring = least is not None and cost.gathered_bytes > least
        return cost.rounds + (n_workers - 2 if is_ring else 0)

    def transfer_s(self, sent_bytes: float, received_bytes: float) -> float:
        """Return the seconds to send and receive bytes at the same time, without latency."""
        busy_bytes = max(sent_bytes, received_bytes)
        if not self.full_duplex:
            busy_bytes = sent_bytes + received_bytes
        return 8 * busy_bytes / self.rate_bit_per_s


LEAST_OVERLAP_BUCKETS, MOST_OVERLAP_BUCKETS = 2, 8
"""Fewer buckets hide nothing; 12 were no faster than 8 at 100 Mbit/s."""

BUCKET_S = 1.5e-3
"""Seconds that a further bucket adds to a step. Between two hosts with free cores it is a quarter
of a millisecond. With the buckets that this chooses, the share of full speed rose by half a point
beside emulated accelerators, and fell by 2.5 where backward needs the same cores."""


def exchange_seconds(
    pattern: Exchange, shape: BucketShape, link: LinkModel, *, both_ways: bool = False
) -> float:
    """Predict the seconds of one bucket's exchange, by its busiest rank.

    Equation:
        T = rounds * latency_s + (messages - rounds) * message_s + 8 * bytes / rate_bit_per_s
        rounds: those of the pattern, and n - 2 more where an all-gather goes along a ring.
        bytes: of the larger direction where a rank sends and receives at once over a full-duplex
        link, of both otherwise; exactly as ``pattern.plan`` declares them.

    Args:
        pattern: The pattern.
        shape: Sizes of the bucket.
        link: The link.
        both_ways: Whether the busiest rank sends and receives at once in any case, as beside the
            exchanges of other buckets.
    """
    if shape.n_shards == 1:
        return 0.0
    both_ways = both_ways or pattern.cost(shape).both_ways
    # The first rank may be special, as under ParameterServer; all others are alike.
    ranks = (0, shape.n_shards - 1)
    return max(_rank_seconds(pattern, shape, link, rank, both_ways=both_ways) for rank in ranks)


def choose_exchange(shape: BucketShape, link: LinkModel, *, weighted: bool = False) -> Exchange:
    """Choose the fastest pattern that carries a bucket, perhaps with weighted votes.

    Of equals it is the first of ``PATTERNS``.

    Ranks that give equal arguments get equal answers.
    """
    able = [each for each in PATTERNS.values() if each.carries(shape, weighted=weighted)]
    return min(able, key=lambda pattern: exchange_seconds(pattern, shape, link))


def _rank_seconds(
    pattern: Exchange, shape: BucketShape, link: LinkModel, rank: int, *, both_ways: bool
) -> float:
    plan = pattern.plan(shape, rank)
    rounds = link.count_rounds(pattern.cost(shape), shape.n_shards)
    if both_ways:
        transfer_s = link.transfer_s(plan.sent_bytes, plan.received_bytes)
    else:
        transfer_s = link.transfer_s(plan.sent_bytes, 0) + link.transfer_s(0, plan.received_bytes)
    further_messages = max(0, plan.messages - rounds)
    return rounds * link.latency_s + further_messages * link.message_s + transfer_s


def count_overlap_buckets(shapes: Sequence[tuple[BucketShape, LinkModel]]) -> int:
    """Choose the number of buckets to overlap with the backward pass, instead of a few large ones.

    Equation:
        k = sqrt(T / L), of which at least 2 and at most 8
        T is the seconds that the bytes take, L those of the rounds of one bucket, under
        ``AllReduce``, and of the processor: all but the last of k buckets are hidden, so that
        T / k + k L shows, least at this k.

    Args:
        shapes: The large buckets, each with its link.
    """
    transfer_s, bucket_s = 0.0, BUCKET_S
    for shape, link in shapes:
        empty = replace(shape, vote_bytes=0, reply_bytes=0)
        least_s = exchange_seconds(AllReduce(), empty, link)
        transfer_s += max(0.0, exchange_seconds(AllReduce(), shape, link) - least_s)
        bucket_s = max(bucket_s, BUCKET_S + least_s)
    best = round(math.sqrt(transfer_s / bucket_s))
    return min(MOST_OVERLAP_BUCKETS, max(LEAST_OVERLAP_BUCKETS, best))

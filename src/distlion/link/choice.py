"""Seconds of one bucket's exchange under each pattern, and the choice of the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distlion.errors import UnsupportedTypeError
from distlion.exchange import (
    MOST_BYTES_AT_ONCE,
    AllGather,
    AllReduce,
    Exchange,
    ParameterServer,
)
from distlion.layout import BucketShape
from distlion.link.link_model import LinkModel

LEAST_OVERLAP_BUCKETS, MOST_OVERLAP_BUCKETS = 2, 4
"""Fewer hide nothing; more cost processor time, which 4 ranks on 2 cores do not have to spare."""

ONE_ROUND = 1
"""Of an all-to-all, a gather or a scatter: Gloo starts all messages at once (gloo/alltoall.cc)."""


def all_gather_rounds(n_workers: int, chunk_bytes: int) -> int:
    """Count the rounds of an all-gather: Gloo passes large chunks along a ring (gloo/allgather.cc).

    ``Link.all_gather`` sends small ones to everybody at once.
    """
    return ONE_ROUND if chunk_bytes <= MOST_BYTES_AT_ONCE else n_workers - 1


@dataclass(frozen=True)
class Schedule:
    """How a pattern's bytes follow each other.

    Attributes:
        rounds: Number of rounds, one after the other, for a bucket of several workers.
        both_ways: Whether the busiest rank sends and receives at the same time.
    """

    rounds: Callable[[BucketShape], int]
    both_ways: bool


SCHEDULES: dict[type[Exchange], Schedule] = {
    AllReduce: Schedule(
        lambda shape: ONE_ROUND + all_gather_rounds(shape.n_shards, shape.reply_bytes),
        both_ways=True,
    ),
    AllGather: Schedule(
        lambda shape: all_gather_rounds(shape.n_shards, shape.n_shards * shape.vote_bytes),
        both_ways=True,
    ),
    ParameterServer: Schedule(lambda shape: 2 * ONE_ROUND, both_ways=False),
}
"""The one place that says how many rounds each pattern takes."""

PATTERNS: tuple[Exchange, ...] = (AllReduce(), AllGather(), ParameterServer())
"""Those to choose from; of equally fast ones the first is taken."""


def exchange_seconds(pattern: Exchange, shape: BucketShape, link: LinkModel) -> float:
    """Predict the seconds of one bucket's exchange, those of the busiest rank.

    Equation:
        T = rounds * latency_s + (messages - rounds) * message_s + 8 * bytes / rate_bit_per_s
        bytes: of the larger direction where a rank sends and receives at once over a full-duplex
        link, of both otherwise; exactly as ``pattern.plan`` declares them.

    Raises:
        UnsupportedTypeError: The pattern is not one of ``SCHEDULES``.
    """
    schedule = SCHEDULES.get(type(pattern))
    if schedule is None:
        known = ", ".join(sorted(kind.__name__ for kind in SCHEDULES))
        raise UnsupportedTypeError(f"pattern {pattern!r} has no schedule; known: {known}")
    if shape.n_shards == 1:
        return 0.0
    rounds = schedule.rounds(shape)
    # Rank 0 may be special, as under Server; all others are alike.
    return max(
        _rank_seconds(pattern, shape, link, rank=rank, rounds=rounds, both_ways=schedule.both_ways)
        for rank in (0, shape.n_shards - 1)
    )


def choose_exchange(shape: BucketShape, link: LinkModel) -> Exchange:
    """Choose the fastest pattern for a bucket; of equally fast ones the first of ``PATTERNS``.

    Ranks that give equal arguments get equal answers.
    """
    return min(PATTERNS, key=lambda pattern: exchange_seconds(pattern, shape, link))


def _rank_seconds(
    pattern: Exchange,
    shape: BucketShape,
    link: LinkModel,
    *,
    rank: int,
    rounds: int,
    both_ways: bool,
) -> float:
    plan = pattern.plan(shape, rank)
    if both_ways:
        transfer_s = link.transfer_s(plan.sent_bytes, plan.received_bytes)
    else:
        transfer_s = link.transfer_s(plan.sent_bytes, 0) + link.transfer_s(0, plan.received_bytes)
    further_messages = max(0, plan.messages - rounds)
    return rounds * link.latency_s + further_messages * link.message_s + transfer_s


def count_overlap_buckets(shapes: Sequence[tuple[BucketShape, LinkModel]]) -> int:
    """Choose how many buckets to overlap with the backward pass, instead of a few large ones.

    Equation:
        k = sqrt(T / L), of which at least 2 and at most 4
        T is the seconds that the bytes take, L those of the rounds of one bucket, under
        ``AllReduce``: all but the last of k buckets are hidden, so that T / k + k L shows, least at
        this k.

    Args:
        shapes: The large buckets, each with its link.
    """
    transfer_s = latency_s = 0.0
    for shape, link in shapes:
        empty = replace(shape, vote_bytes=0, reply_bytes=0)
        least_s = exchange_seconds(AllReduce(), empty, link)
        transfer_s += max(0.0, exchange_seconds(AllReduce(), shape, link) - least_s)
        latency_s = max(latency_s, least_s)
    best = round(math.sqrt(transfer_s / latency_s)) if latency_s else LEAST_OVERLAP_BUCKETS
    return min(MOST_OVERLAP_BUCKETS, max(LEAST_OVERLAP_BUCKETS, best))

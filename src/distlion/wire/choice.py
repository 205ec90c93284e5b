"""Seconds of one bucket's exchange under each pattern, and the choice of the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from distlion.layout import BucketShape
from distlion.wire.all_reduce import AllReduce
from distlion.wire.link_model import LinkModel
from distlion.wire.pattern import Exchange
from distlion.wire.registry import PATTERNS

LEAST_OVERLAP_BUCKETS, MOST_OVERLAP_BUCKETS = 2, 8
"""Fewer buckets hide nothing; 12 were no faster than 8 at 100 Mbit/s."""

BUCKET_S = 1.5e-3
"""Seconds that a further bucket adds to a step, if backward needs the same core: 1 to 4 ms for 2
hosts with a core each, under network emulation. It takes more processor time
(``Machine.bucket_s``), but part of it while the step waits for the link anyway."""


def exchange_seconds(pattern: Exchange, shape: BucketShape, link: LinkModel) -> float:
    """Predict the seconds of one bucket's exchange, by its busiest rank.

    Equation:
        T = rounds * latency_s + (messages - rounds) * message_s + 8 * bytes / rate_bit_per_s
        bytes: of the larger direction where a rank sends and receives at once over a full-duplex
        link, of both otherwise; exactly as ``pattern.plan`` declares them.
    """
    if shape.n_shards == 1:
        return 0.0
    return _busiest_seconds(pattern, shape, link, both_ways=pattern.cost(shape).both_ways)


def stream_seconds(pattern: Exchange, shape: BucketShape, link: LinkModel, n_buckets: int) -> float:
    """Predict the seconds of the exchanges of ``n_buckets`` equal buckets, with several under way.

    While the replies of one bucket return, the votes of the next ones are sent.

    Equation:
        T = T_1 + (n - 1) T_n
        T_1 is ``exchange_seconds``; T_n likewise, but with sending and receiving at once.
    """
    if shape.n_shards == 1:
        return 0.0
    further_s = _busiest_seconds(pattern, shape, link, both_ways=True)
    return exchange_seconds(pattern, shape, link) + (n_buckets - 1) * further_s


def choose_exchange(shape: BucketShape, link: LinkModel, *, weighted: bool = False) -> Exchange:
    """Choose the fastest pattern that carries a bucket, perhaps with weighted votes.

    Of equals it is the first of ``PATTERNS``.

    Ranks that give equal arguments get equal answers.
    """
    able = [each for each in PATTERNS.values() if each.carries(shape, weighted=weighted)]
    return min(able, key=lambda pattern: exchange_seconds(pattern, shape, link))


def _busiest_seconds(
    pattern: Exchange, shape: BucketShape, link: LinkModel, *, both_ways: bool
) -> float:
    # The first rank may be special, as under ParameterServer; all others are alike.
    ranks = (0, shape.n_shards - 1)
    return max(_rank_seconds(pattern, shape, link, rank, both_ways=both_ways) for rank in ranks)


def _rank_seconds(
    pattern: Exchange, shape: BucketShape, link: LinkModel, rank: int, *, both_ways: bool
) -> float:
    plan, rounds = pattern.plan(shape, rank), pattern.cost(shape).rounds
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

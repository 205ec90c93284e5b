import itertools
from dataclasses import replace

import pytest

from distlion.layout import BucketShape
from distlion.wire import (
    MOST_BYTES_AT_ONCE,
    PATTERNS,
    AllGather,
    AllReduce,
    ByteCount,
    LinkModel,
    ParameterServer,
)
from distlion.wire.cost import choose_exchange, count_overlap_buckets, exchange_seconds
from distlion.wire.recursive_doubling import RecursiveDoubling

SLOW = LinkModel(latency_s=0.0, rate_bit_per_s=8.0)
"""One byte takes one second, and nothing else takes time."""

patterns = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=repr)


def make_shape(n_shards, vote_bytes=64, reply_bytes=64, n_params=1):
    # Votes have one bit, and so one plane.
    return BucketShape(n_shards, n_params, vote_bytes, reply_bytes, False, vote_bytes)


@patterns
def test_single_worker_takes_no_time(pattern):
    assert exchange_seconds(pattern, make_shape(1), LinkModel(1.0, 1.0)) == 0.0


@pytest.mark.parametrize("n", range(2, 9))
@patterns
def test_seconds_of_bytes_are_those_of_the_plan_of_the_busiest_rank(pattern, n):
    shape = make_shape(n, vote_bytes=128, reply_bytes=64)
    plans = [pattern.plan(shape, rank) for rank in range(n)]
    # A pattern that does not send and receive at once takes the time of both.
    join = max if pattern.cost(shape).both_ways else lambda sent, received: sent + received
    expected = max(join(plan.sent_bytes, plan.received_bytes) for plan in plans)
    assert exchange_seconds(pattern, shape, SLOW) == expected


@pytest.mark.parametrize("n", range(2, 9))
@patterns
def test_latency_counts_the_rounds(pattern, n):
    link = LinkModel(latency_s=1.0, rate_bit_per_s=1e30)
    for n_bytes in (64, 1 << 20):
        shape = make_shape(n, n_bytes, n_bytes)
        assert exchange_seconds(pattern, shape, link) == pytest.approx(pattern.cost(shape).rounds)


@pytest.mark.parametrize("n", range(2, 9))
def test_large_chunks_go_to_one_peer_in_a_round_along_a_ring_alone(n):
    straight = LinkModel(1.0, 1e30)
    ring = replace(straight, ring_above_bytes=MOST_BYTES_AT_ONCE)
    small, large = make_shape(n, 64, 64), make_shape(n, 1 << 20, 1 << 20)

    def rounds(pattern, *, along_ring):
        link = ring if along_ring else straight
        return [round(exchange_seconds(pattern, shape, link)) for shape in (small, large)]

    assert rounds(AllReduce(), along_ring=True) == [2, 1 + (n - 1)]
    assert rounds(AllGather(), along_ring=True) == [1, n - 1]
    assert rounds(ParameterServer(), along_ring=True) == [2, 2]
    assert rounds(AllReduce(), along_ring=False) == rounds(ParameterServer(), along_ring=False)
    assert rounds(AllGather(), along_ring=False) == [1, 1]


def test_auto_prefers_one_round_to_a_ring():
    link, shape = LinkModel(0.05, 1e9), make_shape(4, 1 << 18, 1 << 18)
    assert choose_exchange(shape, link) == AllGather()
    assert choose_exchange(shape, replace(link, ring_above_bytes=MOST_BYTES_AT_ONCE)) != AllGather()


def test_further_messages_of_a_round_cost_time_of_their_own():
    link = LinkModel(latency_s=0.0, rate_bit_per_s=1e30, message_s=1.0)
    # Rank 0 sends seven replies at once: six after the first, less the round of the votes.
    assert exchange_seconds(ParameterServer(), make_shape(8), link) == pytest.approx(5)


@patterns
def test_half_duplex_takes_as_long_as_both_directions_together(pattern):
    full, half = LinkModel(0.0, 8.0), LinkModel(0.0, 8.0, full_duplex=False)
    plan = pattern.plan(make_shape(4), 0)
    assert exchange_seconds(pattern, make_shape(4), half) == plan.sent_bytes + plan.received_bytes
    assert exchange_seconds(pattern, make_shape(4), full) <= exchange_seconds(
        pattern, make_shape(4), half
    )


@patterns
def test_seconds_grow_with_bytes_latency_and_falling_rate(pattern):
    link = LinkModel(1e-4, 1e9)
    grid = itertools.product((2, 3, 16), (64, 6400, 640_000))
    for n, n_bytes in grid:
        seconds = exchange_seconds(pattern, make_shape(n, n_bytes, n_bytes), link)
        assert seconds < exchange_seconds(pattern, make_shape(n, 2 * n_bytes, n_bytes), link)
        assert seconds < exchange_seconds(
            pattern, make_shape(n, n_bytes, n_bytes), LinkModel(1e-3, 1e9)
        )
        assert seconds < exchange_seconds(
            pattern, make_shape(n, n_bytes, n_bytes), LinkModel(1e-4, 1e8)
        )


def test_large_bucket_takes_all_reduce():
    assert choose_exchange(make_shape(8, 1 << 20, 1 << 20), LinkModel(1e-4, 1e9)) == AllReduce()


def test_tiny_bucket_of_three_takes_one_round_less_by_another_pattern():
    shape = make_shape(3)
    link = LinkModel(latency_s=1e-3, rate_bit_per_s=1e9)
    seconds = {repr(p): exchange_seconds(p, shape, link) for p in PATTERNS.values()}
    assert seconds[repr(choose_exchange(shape, link))] == min(seconds.values())
    assert choose_exchange(shape, link) != AllReduce()


def test_equal_seconds_go_to_the_first_of_the_registry():
    first = next(iter(PATTERNS.values()))
    assert choose_exchange(make_shape(1), LinkModel(1e-4, 1e9)) == first


def test_floats_take_a_pattern_that_does_not_count_in_parts():
    # Many workers, and a link on which only messages count: few of them are worth any bytes.
    shape = make_shape(1000, 64, 64)
    link = LinkModel(latency_s=1e-9, rate_bit_per_s=1e15, message_s=1.0)
    assert choose_exchange(shape, link) == RecursiveDoubling()
    assert not choose_exchange(replace(shape, plane_bytes=None), link).counts_in_parts


def test_weighted_votes_take_a_pattern_that_counts_them():
    shape = make_shape(1000, 64, 64)
    link = LinkModel(latency_s=1e-9, rate_bit_per_s=1e15, message_s=1.0)
    assert choose_exchange(shape, link, weighted=False) == RecursiveDoubling()
    assert choose_exchange(shape, link, weighted=True) == ParameterServer()


def test_a_pattern_of_the_registry_is_a_choice(monkeypatch):
    class Instant(AllReduce):
        def cost(self, shape):
            return super().cost(shape)._replace(rounds=0)

        def plan(self, shape, rank):
            return ByteCount()

    monkeypatch.setitem(PATTERNS, "instant", Instant())
    assert choose_exchange(make_shape(2), LinkModel(1e-4, 1e9)) == Instant()


@pytest.mark.parametrize(("rate_bit_per_s", "n_buckets"), [(1e6, 8), (2e7, 5), (1e11, 2)])
def test_as_many_buckets_overlap_as_pay(rate_bit_per_s, n_buckets):
    link = LinkModel(latency_s=1e-3, rate_bit_per_s=rate_bit_per_s)
    shape = make_shape(4, vote_bytes=32_768, reply_bytes=32_768)
    # sqrt(T / L) is 21, 4.7 and 0.07: two rounds, in each 3 peers, and 1.5 ms of the processor.
    assert count_overlap_buckets([(shape, link)]) == n_buckets


def test_buckets_of_several_devices_count_together():
    link, shape = LinkModel(1e-3, 1e8), make_shape(4, vote_bytes=32_768, reply_bytes=32_768)
    assert count_overlap_buckets([(shape, link)]) == 2
    assert count_overlap_buckets([(shape, link)] * 3) == 4
    assert count_overlap_buckets([]) == 2


def test_instant_link_takes_the_fewest_buckets():
    shape = make_shape(4, vote_bytes=32_768, reply_bytes=32_768)
    assert count_overlap_buckets([(shape, LinkModel(0.0, 1e15))]) == 2

"""Every backend counts what the reference on the CPU does: bitwise identical."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backends import INTERPRETS, Backend, over_others
from conformance import BIG, BUCKETS, MANY, conform, over_sample
from kernel_cases import COUNTERS, counting

WORKERS = (1, 2, 5, 8, 3, 15, 16, 4, 17, *(() if INTERPRETS else (64, 33, 1000, 4096)))
over_counters = pytest.mark.parametrize("counter", COUNTERS)


@over_others
@over_counters
@over_sample("numbers", WORKERS)
def test_counts_of_any_number_of_workers_are_equal(
    numbers: Sequence[int], counter: str, backend: Backend
) -> None:
    for n_workers in numbers:
        sizes = (65, 3, 0, 64, 130, 1, 1, 7) if n_workers < 1000 else (65, 3, 64)
        conform(backend, *counting(counter, n_workers, sizes, share=0.6))
        if n_workers < 1000:  # the reference counts one by one
            conform(backend, *counting(counter, n_workers, sizes))
            conform(backend, *counting(counter, n_workers, sizes, ties=True))


WEIGHTS: tuple[tuple[int, ...], ...] = (
    (2, 1, 1, 3),
    (3,),
    (1, 2),
    (1,) * 20 + (19,),
    (7, 1, 4, 2, 2),
    *(() if INTERPRETS else ((255, 255, 1), (255,) * 16)),
)


@over_others
@over_counters
@over_sample("rosters", WEIGHTS)
def test_votes_that_count_several_times_are_counted_alike(
    rosters: Sequence[tuple[int, ...]], counter: str, backend: Backend
) -> None:
    """16 weights of 255 are 4,080 votes, of the 4,096 that the C++ core adds."""
    sizes = (65, 3, 0, 64, 130, 1, 1, 7)
    # The reference adds 4,080 votes one by one: once for few planes and once for many.
    is_between = counter in [f"levels of {planes} planes" for planes in range(2, 8)]
    for weights in rosters:
        n = len(weights)
        if is_between and sum(weights) > 1000:
            continue
        conform(backend, *counting(counter, n, sizes, weights=weights))
        if sum(weights) > 1000:
            continue
        conform(backend, *counting(counter, n, sizes, weights=weights, ties=True))
        conform(backend, *counting(counter, n, sizes, weights=weights, share=0.6))
        conform(backend, *counting(counter, n, MANY, weights=weights, shard=(1, 3), share=0.6))


@over_others
@over_counters
def test_counts_of_any_size_are_equal(counter: str, backend: Backend) -> None:
    for sizes in BUCKETS:
        conform(backend, *counting(counter, 4, sizes, ties=True))
        conform(backend, *counting(counter, 3, sizes, share=0.7))


@over_others
@over_counters
@over_sample("shards", [(shard, n_shards) for n_shards in (2, 3, 7) for shard in range(n_shards)])
def test_counts_of_shards_are_equal(
    shards: Sequence[tuple[int, int]], counter: str, backend: Backend
) -> None:
    for shard in shards:
        conform(backend, *counting(counter, 4, MANY, shard=shard, ties=True))
        conform(backend, *counting(counter, 5, MANY, shard=shard, share=0.5))


@over_others
@pytest.mark.parametrize("counter", [name for name in COUNTERS if "levels of" not in name])
def test_a_million_counts_are_equal(counter: str, backend: Backend) -> None:
    conform(backend, *counting(counter, 2, BIG))


@over_others
def test_a_million_counts_of_levels_are_equal(backend: Backend) -> None:
    conform(backend, *counting("levels of 3 planes", 2, BIG))

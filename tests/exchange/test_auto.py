"""The rule behind exchange="auto"."""

import pytest

from distlion.exchange import BucketShape, Direct, Gather, choose_exchange
from distlion.exchange.auto import SPARE_BYTES


def shape_of(n_shards: int, shard_bytes: int) -> BucketShape:
    return BucketShape(n_shards, 5, shard_bytes, shard_bytes, has_counts=False)


def test_tiny_buckets_are_gathered() -> None:
    assert choose_exchange(shape_of(8, 64)) == Gather()


def test_large_buckets_go_directly_to_their_owners() -> None:
    assert choose_exchange(shape_of(3, 1 << 20)) == Direct()


def test_two_workers_gather_because_that_sends_no_more() -> None:
    assert choose_exchange(shape_of(2, 1 << 20)) == Gather()


@pytest.mark.parametrize("n_shards", [2, 3, 5, 16])
@pytest.mark.parametrize("shard_bytes", [64, 640, 6400, 64000])
def test_the_choice_follows_the_plans(n_shards: int, shard_bytes: int) -> None:
    shape = shape_of(n_shards, shard_bytes)
    extra = Gather().plan(shape).sent_bytes - Direct().plan(shape).sent_bytes
    assert (choose_exchange(shape) == Gather()) == (extra <= SPARE_BYTES)

"""Words, blocks, shards and buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlion.errors import InvalidArgumentError
from distlion.layout import (
    BLOCK_WORDS,
    ChunkShape,
    bucket_of_one,
    count_words,
    fill_buckets,
    pad_bytes,
    place_parameters,
    shape_node,
    take_part,
)
from distlion.step.nodes import Cutter

SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 9), st.integers(1, 10_000))
def test_every_word_of_a_bucket_belongs_to_at_most_one_parameter(
    sizes: list[int], n_shards: int, bucket_elements: int
) -> None:
    slots = place_parameters([str(i) for i in range(len(sizes))], sizes)
    buckets = fill_buckets(
        slots, [0] * len(sizes), n_shards=n_shards, bucket_elements=bucket_elements
    )
    for bucket in buckets:
        words = [
            word
            for slot in bucket.slots
            for word in range(slot.bucket_word, slot.bucket_word + slot.n_words)
        ]
        assert words == sorted(set(words))
        assert words[-1] < bucket.n_blocks * BLOCK_WORDS


@given(SIZES, st.integers(1, 9), st.integers(1, 10_000))
def test_every_parameter_with_coordinates_is_in_exactly_one_bucket(
    sizes: list[int], n_shards: int, bucket_elements: int
) -> None:
    slots = place_parameters([str(i) for i in range(len(sizes))], sizes)
    kinds = [index % 2 for index in range(len(sizes))]
    buckets = fill_buckets(slots, kinds, n_shards=n_shards, bucket_elements=bucket_elements)
    members = [member for bucket in buckets for member in bucket.members]
    assert sorted(members) == [index for index, size in enumerate(sizes) if size]


@given(SIZES, st.integers(1, 9))
def test_shards_are_equal_and_padding_is_less_than_one_block_a_shard(
    sizes: list[int], n_shards: int
) -> None:
    slots = place_parameters([str(i) for i in range(len(sizes))], sizes)
    for bucket in fill_buckets(slots, [0] * len(sizes), n_shards=n_shards, bucket_elements=10**9):
        used = sum(slot.n_words for slot in bucket.slots)
        spare = bucket.n_blocks * BLOCK_WORDS - used
        assert bucket.n_blocks == n_shards * bucket.shard_blocks
        assert 0 <= spare < n_shards * BLOCK_WORDS


@given(SIZES, st.integers(1, 5), st.integers(1, 10_000))
def test_global_words_depend_on_nothing_but_earlier_parameters(
    sizes: list[int], n_shards: int, bucket_elements: int
) -> None:
    slots = place_parameters([str(i) for i in range(len(sizes))], sizes)
    firsts = [sum(count_words(size) for size in sizes[:index]) for index in range(len(sizes))]
    for bucket in fill_buckets(
        slots, [0] * len(sizes), n_shards=n_shards, bucket_elements=bucket_elements
    ):
        assert [slot.first_word for slot in bucket.slots] == [firsts[m] for m in bucket.members]


def test_a_bucket_takes_no_further_parameter_beyond_its_limit() -> None:
    slots = place_parameters(list("abcd"), [64, 64, 640, 64])
    buckets = fill_buckets(slots, [0] * 4, n_shards=2, bucket_elements=128)
    assert [bucket.members for bucket in buckets] == [(0, 1), (2,), (3,)]


def test_backwards_buckets_come_in_the_order_in_which_backward_completes_them() -> None:
    slots = place_parameters(list("abcde"), [64] * 5)
    kinds = ["x", "y", "x", "y", "y"]
    buckets = fill_buckets(slots, kinds, n_shards=2, bucket_elements=128, backwards=True)
    assert [bucket.members for bucket in buckets] == [(4, 3), (1,), (2, 0)]
    # Coins are drawn by the global word, which does not depend on the order.
    assert [slot.first_word for bucket in buckets for slot in bucket.slots] == [4, 3, 1, 2, 0]


UNIT = 128


def cut_params(sizes: list[int], *, n_parts: int) -> list[tuple[tuple[int, int], ...]]:
    cutter = Cutter(n_parts, UNIT)
    return [cutter.cut(size) for size in sizes]


@given(SIZES, st.integers(1, 9))
def test_pieces_cover_every_parameter_once_and_begin_at_units(
    sizes: list[int], n_parts: int
) -> None:
    pieces = cut_params(sizes, n_parts=n_parts)
    for size, cut in zip(sizes, pieces, strict=True):
        assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])]
        assert cut[-1][1] == size
        assert all(start % UNIT == 0 or start == stop for start, stop in cut)
        assert max(stop - start for start, stop in cut) <= UNIT * -(-size // (UNIT * n_parts))


@given(SIZES, st.integers(1, 9), st.integers(0, 10))
def test_pieces_do_not_depend_on_later_parameters(
    sizes: list[int], n_parts: int, n_first: int
) -> None:
    pieces = cut_params(sizes, n_parts=n_parts)
    first = cut_params(sizes[:n_first], n_parts=n_parts)
    assert pieces[:n_first] == first


def test_parts_take_turns_with_what_is_left_over() -> None:
    pieces = cut_params([UNIT] * 6, n_parts=3)
    holders = [[stop > start for start, stop in cut].index(True) for cut in pieces]
    assert holders == [0, 1, 2, 0, 1, 2]


def test_part_of_a_bucket_keeps_the_global_words() -> None:
    sizes = [1000, 64, 300]
    slots = place_parameters(list("abc"), sizes)
    (bucket,) = fill_buckets(slots, [0] * 3, n_shards=2, bucket_elements=10**6)
    pieces = cut_params(sizes, n_parts=2)
    part = take_part(bucket, pieces, 1, n_shards=4)
    assert part.n_shards == 4
    expected = [
        (position, pieces[position][1][1] - pieces[position][1][0], slots[position].first_word)
        for position in range(3)
    ]
    found = [
        (position, slot.n_elements, slot.first_word - pieces[position][1][0] // 64)
        for position, slot in zip(part.members, part.slots, strict=True)
    ]
    assert found == [entry for entry in expected if entry[1]]
    assert part.slots[0].bucket_word == 0


def test_buckets_and_their_parts_keep_where_a_slot_starts_among_the_coins() -> None:
    sizes, first_bits = [1000, 64, 300], [7, 0, 63]
    slots = [
        slot._replace(first_bit=bit)
        for slot, bit in zip(place_parameters(list("abc"), sizes), first_bits, strict=True)
    ]
    (bucket,) = fill_buckets(slots, [0] * 3, n_shards=2, bucket_elements=10**6)
    assert [slot.first_bit for slot in bucket.slots] == first_bits
    for number in range(2):
        part = take_part(bucket, cut_params(sizes, n_parts=2), number, n_shards=2)
        assert [slot.first_bit for slot in part.slots] == [first_bits[m] for m in part.members]


def test_a_bucket_is_sized_in_one_place() -> None:
    slots = place_parameters(list("ab"), [1000, 64])
    (bucket,) = fill_buckets(slots, [0] * 2, n_shards=2, bucket_elements=10**6)
    # 17 words, so 2 blocks of 8 words a shard.
    shape = bucket.shape(vote_planes=3, reply_planes=2, has_counts=True, has_partial_sums=True)
    assert (shape.vote_bytes, shape.reply_bytes) == (2 * 3 * 64, 2 * 2 * 64)
    assert (shape.vote_chunk.n_bytes, shape.whole_vote_chunk.n_bytes) == (
        64 + 64 + 384,
        64 + 64 + 2 * 384,
    )
    assert (shape.reply_chunk.n_bytes, shape.whole_reply_chunk.n_bytes) == (
        64 + 64 + 64 + 256,
        64 + 64 + 64 + 2 * 256,
    )
    # Two votes of 3 bits add up to 14 at most: a sum has 4 bits.
    assert shape.sum_chunk(2).n_bytes == 64 + 64 + 64 + 2 * 64 + 2 * 2 * 4 * 64


def test_what_cannot_be_counted_in_parts_has_no_sum() -> None:
    shape = bucket_of_one(1000, 2).shape(
        vote_planes=32, reply_planes=2, has_counts=False, has_partial_sums=False
    )
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        shape.sum_chunk(2)


def test_the_chunks_of_a_node_hold_its_largest_part() -> None:
    sizes = [1000, 64, 300]
    slots = place_parameters(list("abc"), sizes)
    (bucket,) = fill_buckets(slots, [0] * 3, n_shards=2, bucket_elements=10**6)
    pieces = cut_params(sizes, n_parts=3)
    parts = [take_part(bucket, pieces, part, n_shards=2) for part in range(3)]
    shapes = [
        part.shape(vote_planes=1, reply_planes=2, has_counts=False, has_partial_sums=False)
        for part in parts
    ]
    node = shape_node(3, parts, shapes, torch.bfloat16)
    held = [sum(slot.n_elements for slot in part.slots) for part in parts]
    assert node.gradients == ChunkShape(3, pad_bytes(2 * max(held)))
    assert node.replies.payload_bytes == max(2 * shape.reply_bytes for shape in shapes)
    assert node.replies.n_params == max(len(part.slots) for part in parts)

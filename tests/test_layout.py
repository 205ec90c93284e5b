"""Words, blocks, shards and buckets."""

from hypothesis import given
from hypothesis import strategies as st

from distlion.layout import BLOCK_WORDS, count_words, fill_buckets, place_parameters

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

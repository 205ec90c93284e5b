import pytest

from distlion_lab.baselines.ring import ring_all_gather_bytes, ring_all_reduce_bytes


@pytest.mark.parametrize(
    ("world_size", "expected"),
    # 2 (N - 1) / N of 4,000 bytes.
    [(1, 0), (2, 4000), (4, 6000), (5, 6400)],
)
def test_ring_all_reduce_sends_nearly_twice_the_data(world_size, expected):
    assert ring_all_reduce_bytes(1000, world_size) == expected


def test_ring_all_reduce_of_float16_sends_half_the_bytes():
    assert ring_all_reduce_bytes(1000, 4, element_bytes=2) == 3000


@pytest.mark.parametrize(("world_size", "expected"), [(1, 0), (2, 100), (5, 400)])
def test_ring_all_gather_passes_on_every_piece_but_the_last(world_size, expected):
    assert ring_all_gather_bytes(100, world_size) == expected

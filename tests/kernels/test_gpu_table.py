"""The table that kernels for GPUs read: what a launch costs the host, and which tiles are whole."""

from __future__ import annotations

import time

import pytest
import torch

from distlion.kernels import Coefficients, Coin, Segment
from distlion.layout import Slot

pytest.importorskip("triton")
table = pytest.importorskip("distlion.kernels.gpu.table")
bits = pytest.importorskip("distlion.kernels.gpu.bits")

COEFFICIENTS = Coefficients(0.9, 0.99, 1e-4, 0.1)
MOST_MS = 0.5


def make_segment(index: int, first_word: int, *offsets: int) -> Segment:
    n = 9000 + index
    param, grad, exp_avg = (torch.zeros(n + 8)[offset : offset + n] for offset in offsets)
    return Segment(Slot(f"p{index}", n, first_word, first_word), param, grad, exp_avg, COEFFICIENTS)


@pytest.mark.parametrize(
    ("offsets", "is_aligned"),
    [((0, 0, 0), 1), ((4, 0, 4), 1), ((1, 0, 0), 0), ((0, 1, 0), 0), ((0, 0, 2), 0)],
)
def test_a_segment_is_aligned_if_all_of_its_tensors_are(
    offsets: tuple[int, int, int], is_aligned: int
) -> None:
    read = table.read_segments([make_segment(0, 0, *offsets)])
    assert read.rows[1, bits.ALIGNED.value] == is_aligned


def test_tiles_are_those_of_one_kind_after_the_other() -> None:
    segments = [make_segment(index, 150 * index, 0, 0, 0) for index in range(3)]
    half = segments[1].param.bfloat16()
    segments[1] = segments[1]._replace(param=half, grad=half)
    read = table.read_segments(segments)
    assert [(part.kind, part.end - part.begin) for part in read.parts] == [((0, 0), 6), ((1, 0), 3)]
    first, second = (read.tiles[part.begin : part.end].tolist() for part in read.parts)
    assert (first, second) == ([0, 0, 0, 2, 2, 2], [1, 1, 1])
    assert read.rows[1:, bits.FIRST_TILE.value].tolist() == [0, 0, 3]
    # Kernels are compiled for pointers to multiples of 16 bytes.
    assert all(part.begin % 4 == 0 for part in read.parts)


@pytest.mark.slow
def test_the_table_of_150_parameters_takes_the_host_half_a_millisecond() -> None:
    segments = [make_segment(index, 150 * index, 0, 0, 0) for index in range(150)]
    least = float("inf")
    for _ in range(200):
        started = time.perf_counter()
        read = table.read_segments(segments)
        rows = read.mark_present([1] * 150, counts=True)
        table.upload_table(rows, read.tiles, read.device, coin=Coin(3))
        least = min(least, 1e3 * (time.perf_counter() - started))
    assert least < MOST_MS

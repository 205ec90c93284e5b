"""Digests and square sums of every backend are those of the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Generator, Tensor

from backends import Backend, over_all, over_others
from conformance import BIG, Memory, conform, draw, find_difference
from distlion.kernels import Kernels
from distlion.kernels.contract import PARAM_DTYPES

DIGEST_DTYPES = (*PARAM_DTYPES, torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)
DIGEST_SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 63, 64, 65, 1023, 4099, 8191)


def draw_bits(generator: Generator, n: int, dtype: torch.dtype) -> Tensor:
    wide = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator)
    if dtype == torch.bool:
        return wide > 0
    return wide.view(torch.uint8)[: n * dtype.itemsize].clone().view(dtype)


@over_others
@pytest.mark.parametrize("dtype", DIGEST_DTYPES)
def test_digests_are_equal(dtype: torch.dtype, backend: Backend) -> None:
    """All sizes in one call, and one in a call of its own."""

    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        return k.digests([m.place(draw_bits(g, n, dtype)) for n in DIGEST_SIZES])

    (digests,) = conform(backend, f"digests {dtype}", run)
    assert len(set(digests.tolist())) == len(DIGEST_SIZES)
    conform(
        backend, f"digest {dtype}", lambda k, g, m: k.digests([m.place(draw_bits(g, *BIG, dtype))])
    )


@over_others
def test_digests_of_tensors_of_any_shape_and_dtype_are_equal(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        shapes = ((3, 5, 7), (), (2, 0, 3))
        tensors = [m.place(torch.rand(shape, generator=g)) for shape in shapes]
        return k.digests([*tensors, m.place(torch.ones(3, 5, dtype=torch.bfloat16))])

    conform(backend, "digests of any shape", run)


@over_all
def test_there_may_be_nothing_to_digest(backend: Backend) -> None:
    assert find_difference(torch.zeros(0, dtype=torch.int64), backend.kernels.digests([])) == ""


# Square sums.


@over_others
@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_square_sums_are_equal(dtype: torch.dtype, backend: Backend) -> None:
    """The places of ``Memory`` start at odd elements."""
    sizes = (0, 1, 7, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 8192, 3 * 4096 + 5, *BIG)
    for n, wild in itertools.product(sizes, (False, True)):
        conform(
            backend,
            f"square sums {dtype} {n} {wild}",
            lambda k, g, m, n=n, wild=wild: k.square_sums(m.place(draw(g, n, dtype, wild=wild))),
        )


@over_others
def test_square_sums_of_tensors_of_any_shape_are_equal(backend: Backend) -> None:
    for shape in ((3, 5, 7, 41), (), (2, 0, 3), (4097, 1)):
        conform(
            backend,
            f"square sums {shape}",
            lambda k, g, m, shape=shape: k.square_sums(m.place(torch.rand(shape, generator=g))),
        )


@over_all
@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_what_is_not_finite_shows_in_its_block_alone(
    dtype: torch.dtype, special: float, backend: Backend
) -> None:
    for place in (0, 4095, 4096, 2 * 4096, 2 * 4096 + 4):
        tensor = torch.ones(2 * 4096 + 5, dtype=dtype, device=backend.device)
        tensor[place] = special
        expected = torch.tensor([4096.0, 4096.0, 5.0], dtype=torch.float64)
        expected[place // 4096] = abs(special)
        assert find_difference(expected, backend.kernels.square_sums(tensor)) == "", place

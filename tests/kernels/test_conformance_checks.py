"""Coins, digests, square sums and checksums of every backend are those of the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends import TRUTH, Backend, over_all, over_cores, over_others
from conformance import BIG, Memory, conform, draw, find_difference
from distlion.kernels import Coin, Kernels
from distlion.kernels.contract import PARAM_DTYPES
from kernel_cases import TIE, ZERO

STARTS = (0, 1, 0xFFFFFFFF, 0x12345678)


@over_others
def test_coins_are_equal(backend: Backend) -> None:
    for coin, first_word, n_words in itertools.product(
        (ZERO, TIE, Coin(0), Coin(2**64 - 1, inverted=True)),
        (0, 1, 2**33, 2**40 + 5),
        (0, 1, 2, 7, 63, 64, 65, 1023, 4099),
    ):
        conform(
            backend,
            f"coin {coin} from {first_word}, {n_words} words",
            lambda k, g, m, c=coin, w=first_word, n=n_words: k.coin(c, w, n, device=m.device),
        )
    conform(backend, "coin", lambda k, g, m: k.coin(TIE, 3, BIG[0], device=m.device))


# Digests.

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


# Checksums.


@over_others
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 17])
def test_checksums_of_rows_that_lie_apart_are_equal(offset: int, backend: Backend) -> None:
    sizes = (*range(70), 127, 128, 129, 143, 191, 192, 193, 255, 1023, 4099, 65_536)
    generator = torch.Generator().manual_seed(offset)
    data = torch.randint(0, 256, (len(STARTS), 70_000), dtype=torch.uint8, generator=generator)
    moved, starts = data.to(backend.device), torch.tensor(STARTS, device=backend.device)
    for n in sizes:
        rows = slice(offset, offset + n)
        expected = TRUTH.kernels.checksums(data[:, rows], torch.tensor(STARTS))
        found = backend.kernels.checksums(moved[:, rows], starts)
        assert find_difference(expected, found) == "", n
        assert found.device == starts.device


@over_others
def test_checksums_of_a_million_bytes_are_equal(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        return k.checksums(m.place(torch.arange(BIG[0]).to(torch.uint8).unsqueeze(0)), 5)

    conform(backend, "checksum of a million", run)


@over_others
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 5), (5, 1)])
def test_rows_may_be_empty_or_none(shape: tuple[int, int], backend: Backend) -> None:
    for starts in (7, torch.arange(shape[0])):
        expected = TRUTH.kernels.checksums(torch.ones(shape, dtype=torch.uint8), starts)
        rows = torch.ones(shape, dtype=torch.uint8, device=backend.device)
        given = starts.to(backend.device) if isinstance(starts, Tensor) else starts
        assert find_difference(expected, backend.kernels.checksums(rows, given)) == ""


@over_others
def test_rows_may_be_one_and_starts_may_be_strided(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        row = m.place(torch.randint(0, 256, (1, 300), dtype=torch.uint8, generator=g))
        starts = m.place(torch.randint(0, 2**32, (3, 2), generator=g))
        return k.checksums(row.expand(3, 300), starts[:, 0]), starts

    conform(backend, "one row thrice", run)


class Allocations(TorchDispatchMode):
    """Notes the size of the largest tensor that an op of torch returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@over_cores
def test_rows_that_lie_apart_are_not_copied(backend: Backend) -> None:
    rows = torch.zeros(3, 1000, dtype=torch.uint8)[:, 100:]
    with Allocations() as allocations:
        rows.contiguous()
    assert allocations.largest == 2700, "a copy would be seen"
    with Allocations() as allocations:
        backend.kernels.checksums(rows, 0)
    assert 0 < allocations.largest <= 3


# Threads: 262,144 elements or 4 MiB are worth one.


@over_cores
def test_digests_do_not_depend_on_threads(n_threads: int, backend: Backend) -> None:
    sizes = (262_143, 262_144, 524_287, 524_288, 786_432, 1_000_001)
    conform(
        backend,
        "digests on threads",
        lambda k, g, m: k.digests([torch.rand(n, generator=g) for n in sizes]),
    )


@over_cores
@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_square_sums_do_not_depend_on_threads(
    dtype: torch.dtype, n_threads: int, backend: Backend
) -> None:
    # The last one is more than the plain kernels widen at a time.
    for n in (262_143, 524_288, 528_385, 786_431, 1_060_001):
        conform(
            backend,
            f"square sums {dtype} {n}, on threads",
            lambda k, g, m, n=n: k.square_sums(m.place(draw(g, n, dtype))),
        )


@over_cores
@pytest.mark.parametrize("shape", [(1, 9 << 20), (2, 4 << 20), (3, (4 << 20) - 1), (2099, 6000)])
def test_checksums_do_not_depend_on_threads(
    shape: tuple[int, int], n_threads: int, backend: Backend
) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        drawn = torch.randint(0, 256, (shape[0], shape[1] + 5), dtype=torch.uint8, generator=g)
        return k.checksums(m.place(drawn)[:, 5:], torch.arange(shape[0]))

    conform(backend, f"checksums {shape}", run)

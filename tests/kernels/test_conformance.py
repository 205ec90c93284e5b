"""Every instruction set of the C++ core against the plain kernels: equal to the bit.

A case runs twice on equal inputs, once with each backend. What is compared is all memory that the
op could reach, with the elements before and behind every tensor, and what it returned. Of NaN only
the place counts. The inputs of a case follow from its name.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from distlion.kernels import (
    EXP_AVG_DTYPES,
    PARAM_DTYPES,
    Coefficients,
    Coin,
    Kernels,
    ReplyFormat,
    Segment,
    reference,
)
from distlion.kernels.cpu import INSTRUCTION_SETS, Core, CpuKernels
from distlion.layout import BLOCK_WORDS, Bucket, Slot, count_words

REFERENCE = cast(Kernels, reference)
CPU = torch.device("cpu")

MANY = (1, 7, 0, 63, 64, 65, 1023, 4099, 512, 8191, 1, 1)
BUCKETS = ((0,), (1,), (7,), (63,), (64,), (65,), (1023,), (4099,), (8191,), MANY)
BIG = (1_000_003,)
# Longer rows than this repeat, which is not in step with words, blocks or pages.
DRAWN_ELEMENTS = 65_537
# Threads get 262,144 coordinates at least: this is enough for three, with cuts inside parameters.
THREADED = (600_001, 5, 64, 200_003, 82_000)
WORKERS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 1000, 4096)

ZERO = Coin(0x0123456789ABCDEF)
TIE = Coin(0xFEDCBA9876543210, inverted=True)
ROUNDING = Coin(0x243F6A8885A308D3)
HYPER = (
    Coefficients(0.9, 0.99, 3e-4, 0.1),
    Coefficients(0.95, 0.98, 0.3, 0.0, grad_scale=1 / 1024),
    # Here directions cancel to 0, and parameters take large steps.
    Coefficients(0.5, 0.0, 40.0, 0.01, grad_scale=1.0),
    Coefficients(0.0, 0.999, 1e-40, 0.0, grad_scale=3.7),
)
DTYPES = tuple(itertools.product(PARAM_DTYPES, EXP_AVG_DTYPES))
# Every size of one parameter, and many parameters in every dtype.
SIZES_AND_DTYPES = (
    *((sizes, DTYPES[index % len(DTYPES)]) for index, sizes in enumerate(BUCKETS)),
    *((MANY, dtypes) for dtypes in DTYPES),
)


class Memory:
    """Tensors at odd places of larger ones; nothing beside them may be written."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def place(self, values: Tensor) -> Tensor:
        offset = 1 + 2 * (len(self.buffers) % 5)
        buffer = torch.full((values.numel() + 128,), 1).to(values.dtype)
        place = buffer[offset : offset + values.numel()].view(values.shape)
        place.copy_(values)
        self.buffers.append(buffer)
        return place

    def packed(self, *shape: int) -> Tensor:
        """Make a packed tensor full of garbage."""
        return self.place(torch.full((*shape, BLOCK_WORDS), 0x5A5A_F0F0_1234_5677))


Run = Callable[[Kernels, Generator, Memory], object]
_expected: dict[str, list[object]] = {}


def outcome(kernels: Kernels, case: str, run: Run) -> list[object]:
    memory = Memory()
    result = run(kernels, torch.Generator().manual_seed(zlib.crc32(case.encode())), memory)
    return [result, *memory.buffers]


def conform(kernels: CpuKernels, case: str, run: Run) -> object:
    """Run a case with both backends and compare; return what the op returned."""
    if case not in _expected:
        _expected[case] = outcome(REFERENCE, case, run)
    expected = _expected[case]
    if kernels.instruction_set == INSTRUCTION_SETS[-1]:
        del _expected[case]
    actual = outcome(kernels, case, run)
    for place, (one, other) in enumerate(zip(expected, actual, strict=True)):
        difference = find_difference(one, other)
        what = "result" if place == 0 else f"buffer {place - 1}"
        assert not difference, f"{kernels.instruction_set}, {case}, {what}: {difference}"
    return expected[0]


def find_difference(expected: object, actual: object) -> str:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return "" if expected == actual else f"expected {expected}, got {actual}"
    one, other = bits_of(expected), bits_of(actual)
    if torch.equal(one, other):
        return ""
    where = (one != other).nonzero()
    first = int(where[0])
    return (
        f"{expected.dtype}, {len(where)} of {one.numel()} elements differ, the first is [{first}]: "
        f"expected {expected.view(-1)[first].item()!r}, got {actual.view(-1)[first].item()!r}"
    )


def bits_of(tensor: Tensor) -> Tensor:
    """View as integers, all NaN alike."""
    if not tensor.is_floating_point():
        return tensor.view(-1)
    bits = tensor.view(-1).view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    return bits.masked_fill(tensor.view(-1).isnan(), -1)


def make_bucket(sizes: Sequence[int], n_shards: int = 1) -> Bucket:
    words = [count_words(size) for size in sizes]
    starts = itertools.accumulate(words[:-1], initial=0)
    slots = [
        Slot(f"p{index}", size, start + 999_999_937, start)
        for index, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    return Bucket(0, tuple(range(len(sizes))), tuple(slots), n_shards)


def draw(generator: Generator, n: int, dtype: torch.dtype, *, wild: bool = False) -> Tensor:
    """Draw numbers of many sizes with zeros, denormals and huge ones; wild: up to inf and NaN."""
    if n > DRAWN_ELEMENTS:
        row = draw(generator, DRAWN_ELEMENTS, dtype, wild=wild)
        return row.repeat(-(-n // DRAWN_ELEMENTS))[:n]
    limits = torch.finfo(dtype)
    denormal = limits.tiny * limits.eps
    edges = [0.0, -0.0, denormal, -3 * denormal, limits.tiny, -limits.tiny, limits.max / 8, 1.0]
    if wild:
        edges += [limits.max, limits.min, float("inf"), -float("inf"), float("nan")]
    edge = torch.tensor(edges, dtype=torch.float64).to(dtype)
    choice = torch.randint(0, len(edges), (n,), generator=generator)
    scale = torch.exp(4 * torch.randn(n, generator=generator)).clamp(max=1000)
    usual = (torch.randn(n, generator=generator) * scale).to(dtype)
    return torch.where(torch.rand(n, generator=generator) < 0.25, edge[choice], usual)


def make_segments(
    bucket: Bucket,
    generator: Generator,
    memory: Memory,
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    wild: bool = False,
) -> list[Segment]:
    """Make segments; with several of them, some abstain. Wild ones are wild in part."""
    segments = []
    for index, slot in enumerate(bucket.slots):
        n = slot.n_elements
        is_wild = wild and (len(bucket.slots) == 1 or index % 3 == 0)
        grad = draw(generator, n, dtypes[0], wild=is_wild)
        exp_avg = draw(generator, n, dtypes[1])
        # Every seventh direction is exactly 0 where betas are 0.5.
        exp_avg[::7] = -grad[::7].to(dtypes[1])
        segments.append(
            Segment(
                slot,
                memory.place(draw(generator, n, dtypes[0], wild=is_wild)),
                memory.place(grad) if index % 5 != 4 else None,
                memory.place(exp_avg),
                HYPER[(index + n) % len(HYPER)],
            )
        )
    return segments


def draw_words(generator: Generator, *shape: int) -> Tensor:
    low = torch.randint(-(2**63), 2**63 - 1, (*shape, BLOCK_WORDS), generator=generator)
    return low ^ torch.randint(0, 2, low.shape, generator=generator)


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.fixture(params=[1, 2, 3])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Coins and checks.


def test_coins_are_equal(kernels: CpuKernels) -> None:
    for coin, first_word, n_words in itertools.product(
        (ZERO, TIE, Coin(0), Coin(2**64 - 1, inverted=True)),
        (0, 1, 2**33, 2**40 + 5),
        (0, 1, 2, 7, 63, 64, 65, 1023, 4099),
    ):
        conform(
            kernels,
            f"coin {coin} from {first_word}, {n_words} words",
            lambda k, g, m, c=coin, w=first_word, n=n_words: k.coin(c, w, n, device=CPU),
        )
    conform(kernels, "coin", lambda k, g, m: k.coin(TIE, 3, BIG[0], device=CPU))


DIGEST_DTYPES = (*PARAM_DTYPES, torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)


def test_digests_are_equal(kernels: CpuKernels) -> None:
    sizes = (0, 1, 2, 3, 7, 8, 9, 15, 63, 64, 65, 1023, 4099, 8191)
    for dtype, n in [*itertools.product(DIGEST_DTYPES, sizes), *((d, *BIG) for d in PARAM_DTYPES)]:

        def run(k: Kernels, g: Generator, m: Memory, dtype: torch.dtype = dtype, n: int = n) -> int:
            wide = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int64, generator=g)
            if dtype == torch.bool:
                return k.digest(m.place(wide > 0))
            n_bytes = torch.empty(0, dtype=dtype).element_size()
            return k.digest(
                m.place(wide.view(torch.uint8)[: n * n_bytes].clone()).view(-1).clone().view(dtype)
            )

        conform(kernels, f"digest {dtype} {n}", run)


def test_digests_of_tensors_of_any_shape_are_equal(kernels: CpuKernels) -> None:
    conform(kernels, "digest 3-d", lambda k, g, m: k.digest(torch.rand(3, 5, 7, generator=g)))
    conform(kernels, "digest 0-d", lambda k, g, m: k.digest(torch.rand((), generator=g)))


@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_square_sums_are_equal(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """The places of ``Memory`` start at odd elements."""
    sizes = (0, 1, 7, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 8192, 3 * 4096 + 5, *BIG)
    for n, wild in itertools.product(sizes, (False, True)):
        conform(
            kernels,
            f"square sums {dtype} {n} {wild}",
            lambda k, g, m, n=n, wild=wild: k.square_sums(m.place(draw(g, n, dtype, wild=wild))),
        )


def test_square_sums_of_tensors_of_any_shape_are_equal(kernels: CpuKernels) -> None:
    for shape in ((3, 5, 7, 41), (), (2, 0, 3), (4097, 1)):
        conform(
            kernels,
            f"square sums {shape}",
            lambda k, g, m, shape=shape: k.square_sums(m.place(torch.rand(shape, generator=g))),
        )


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_what_is_not_finite_shows_in_its_block_alone(
    kernels: CpuKernels, dtype: torch.dtype, special: float
) -> None:
    for place in (0, 4095, 4096, 2 * 4096, 2 * 4096 + 4):
        tensor = torch.ones(2 * 4096 + 5, dtype=dtype)
        tensor[place] = special
        expected = torch.tensor([4096.0, 4096.0, 5.0], dtype=torch.float64)
        expected[place // 4096] = abs(special)
        assert find_difference(expected, kernels.square_sums(tensor)) == "", place


def test_checksums_are_equal(kernels: CpuKernels) -> None:
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    for n, offset, start in itertools.product(
        (*range(70), 127, 128, 129, 143, 191, 192, 193, 255, 1023, 4099, 65_536),
        (0, 1, 3, 8, 17),
        (0, 1, 0xFFFFFFFF, 0x12345678),
    ):
        part = data[offset : offset + n]
        expected = REFERENCE.checksum(part, start)
        assert kernels.checksum(part, start) == expected, (n, offset, start)


def test_checksums_of_a_million_bytes_are_equal(kernels: CpuKernels) -> None:
    data = torch.arange(BIG[0]).to(torch.uint8)
    assert kernels.checksum(data, 5) == REFERENCE.checksum(data, 5)


# Encoding.

Encode = Callable[[Kernels, Sequence[Segment], Tensor], list[bool]]


def levels_encoder(norm: str, step: float) -> Encode:
    return lambda k, segments, out: k.encode_levels(
        segments,
        ZERO,
        norm=norm,  # type: ignore[arg-type]
        step=step,
        out=out,
    )


ENCODERS: dict[str, tuple[int, Encode]] = {
    "signs": (1, lambda k, segments, out: k.encode_signs(segments, ZERO, out=out)),
    "signs, coin inverted": (1, lambda k, segments, out: k.encode_signs(segments, TIE, out=out)),
    "ternary": (2, lambda k, segments, out: k.encode_ternary(segments, out=out)),
    "directions in float32": (
        32,
        lambda k, segments, out: k.encode_directions(segments, dtype=torch.float32, out=out),
    ),
    "directions in bfloat16": (
        16,
        lambda k, segments, out: k.encode_directions(segments, dtype=torch.bfloat16, out=out),
    ),
    "levels, 4 planes, l1": (4, levels_encoder("l1", 0.5)),
    "levels, 3 planes, linf": (3, levels_encoder("linf", 0.1)),
}


def encoding(
    encoder: str, sizes: Sequence[int], dtypes: tuple[torch.dtype, torch.dtype], *, wild: bool
) -> tuple[str, Run]:
    planes, encode = ENCODERS[encoder]
    if "l1" in encoder:  # a mean needs an element
        sizes = [size for size in sizes if size] or [1]

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[list[bool], list[bool]]:
        bucket = make_bucket(sizes, n_shards=2)
        segments = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        flags = encode(k, segments, m.packed(bucket.n_blocks, planes))
        return flags, k.check_finite(k.gather(segments))

    return f"{encoder} {tuple(sizes)} {dtypes} wild={wild}", run


@pytest.mark.parametrize("encoder", ENCODERS)
def test_votes_are_equal(kernels: CpuKernels, encoder: str) -> None:
    for sizes, dtypes in SIZES_AND_DTYPES:
        flags, checks = conform(kernels, *encoding(encoder, sizes, dtypes, wild=False))
        assert all(flags), "these cases are to test votes"
        assert all(checks)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_votes_are_equal_where_numbers_are_not_finite(kernels: CpuKernels, encoder: str) -> None:
    for dtypes in DTYPES:
        conform(kernels, *encoding(encoder, (65,), dtypes, wild=True))
        flags, _ = conform(kernels, *encoding(encoder, MANY, dtypes, wild=True))
        assert False in flags, "these cases are to test what is not finite"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_million_votes_are_equal(kernels: CpuKernels, encoder: str) -> None:
    conform(kernels, *encoding(encoder, BIG, (torch.bfloat16, torch.float32), wild=False))


@pytest.mark.parametrize("norm", ["l1", "linf"])
def test_levels_of_all_widths_are_equal(kernels: CpuKernels, norm: str) -> None:
    for planes, step in itertools.product(range(1, 9), (1e-3, 0.25, 1.0, 1e30, 1e-320)):

        def run(
            k: Kernels, g: Generator, m: Memory, planes: int = planes, step: float = step
        ) -> list[bool]:
            bucket = make_bucket((8191, 64, 1))
            segments = make_segments(bucket, g, m)
            for segment in segments:  # without the huge ones, which hide all others
                assert segment.grad is not None
                segment.grad.clamp_(-100, 100)
                segment.exp_avg.clamp_(-100, 100)
            return levels_encoder(norm, step)(k, segments, m.packed(bucket.n_blocks, planes))

        conform(kernels, f"levels {norm}, {planes} planes of {step}", run)


def test_levels_of_zeros_and_of_denormals_are_equal(kernels: CpuKernels) -> None:
    for value, norm, step in itertools.product(
        (0.0, -0.0, 1e-45, 1.2e-38, 3e38), ("l1", "linf"), (0.3, 2.0, 1e-30)
    ):

        def run(
            k: Kernels,
            g: Generator,
            m: Memory,
            value: float = value,
            norm: str = norm,
            step: float = step,
        ) -> list[bool]:
            bucket = make_bucket((4096, 5000))
            segments = make_segments(bucket, g, m)
            for segment in segments:
                assert segment.grad is not None
                segment.grad.fill_(value)
                segment.exp_avg.fill_(value)
            return levels_encoder(norm, step)(k, segments, m.packed(bucket.n_blocks, 8))

        conform(kernels, f"levels of {value!r}, {norm}, {step}", run)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("exp_avg_dtype", EXP_AVG_DTYPES)
def test_the_edge_of_infinity_is_where_rounding_puts_it(
    kernels: CpuKernels, encoder: str, exp_avg_dtype: torch.dtype
) -> None:
    planes, encode = ENCODERS[encoder]
    # Bits of floats around the largest bfloat16 and around its infinity by rounding.
    for bits in (
        0x7F7F0000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7F8001,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
    ):

        def run(k: Kernels, g: Generator, m: Memory, bits: int = bits) -> list[bool]:
            bucket = make_bucket((200,))
            grad = torch.zeros(200)
            grad.view(torch.int32)[77] = bits
            segment = Segment(
                bucket.slots[0],
                m.place(torch.zeros(200)),
                m.place(grad),
                m.place(torch.zeros(200, dtype=exp_avg_dtype)),
                Coefficients(0.0, 0.0, 0.1, 0.0),
            )
            return encode(k, [segment], m.packed(bucket.n_blocks, planes))

        conform(kernels, f"edge {encoder} {exp_avg_dtype} {bits:x}", run)


# Counting.

Count = Callable[[Kernels, Tensor, Tensor, Bucket, int, Tensor], None]


def directions_counter(dtype: torch.dtype) -> Count:
    return lambda k, votes, present, bucket, first, out: k.sum_directions(
        votes, present, bucket, first, dtype=dtype, out=out
    )


def count_levels(
    k: Kernels, votes: Tensor, present: Tensor, bucket: Bucket, first: int, out: Tensor
) -> None:
    k.count_levels(votes, present, bucket, first, TIE, out=out)


COUNTERS: dict[str, tuple[int, int, Count]] = {
    "signs": (
        1,
        1,
        lambda k, votes, present, bucket, first, out: k.count_signs(
            votes, present, bucket, first, TIE, out=out
        ),
    ),
    "signs without coin": (
        1,
        2,
        lambda k, votes, present, bucket, first, out: k.count_signs(
            votes, present, bucket, first, None, out=out
        ),
    ),
    "ternary": (
        2,
        2,
        lambda k, votes, present, bucket, first, out: k.count_ternary(
            votes, present, bucket, first, out=out
        ),
    ),
    "ones": (
        1,
        0,
        lambda k, votes, present, bucket, first, out: k.count_ones(
            votes, present, bucket, first, out=out
        ),
    ),
    "directions in float32": (32, 2, directions_counter(torch.float32)),
    "directions in bfloat16": (16, 2, directions_counter(torch.bfloat16)),
    **{f"levels of {planes} planes": (planes, 1, count_levels) for planes in range(1, 9)},
}


def draw_votes(counter: str, n_workers: int, n_blocks: int, *, ties: bool, g: Generator) -> Tensor:
    """Draw votes of every kind, those that no encoder writes too; ties: half against half."""
    planes = COUNTERS[counter][0]
    votes = draw_words(g, n_workers, n_blocks, planes)
    half = n_workers // 2
    if "directions" in counter:
        dtype = torch.float32 if planes == 32 else torch.bfloat16
        values = votes.view(-1).view(dtype)
        drawn = draw(g, values.numel(), dtype, wild=True)
        finite = torch.rand(values.numel(), generator=g) < 0.95
        values.copy_(torch.where(drawn.isfinite() | ~finite, drawn, torch.ones((), dtype=dtype)))
        if ties:
            rows = values.view(n_workers, -1)
            rows[half : 2 * half] = -rows[:half]
    elif ties:
        votes[half : 2 * half] = votes[:half]
        votes[half : 2 * half, :, 0] = ~votes[:half, :, 0]
    return votes


def counting(
    counter: str,
    n_workers: int,
    sizes: Sequence[int],
    *,
    shard: tuple[int, int] = (0, 1),
    ties: bool = False,
    share: float = 1.0,
) -> tuple[str, Run]:
    """Count shard `shard[0]` of `shard[1]`; each worker is present for a `share` of parameters."""
    _, planes, count = COUNTERS[counter]

    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(sizes, n_shards=shard[1])
        n_blocks = bucket.shard_blocks
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        if share < 1:
            present[:, ::4] = False  # nobody
        votes = m.place(draw_votes(counter, n_workers, n_blocks, ties=ties, g=g))
        out = m.packed(n_blocks, planes or n_workers.bit_length())
        count(k, votes, m.place(present), bucket, shard[0] * n_blocks, out)

    return f"{counter}, {n_workers} workers {tuple(sizes)} {shard} ties={ties} {share}", run


@pytest.mark.parametrize("counter", COUNTERS)
def test_counts_of_any_number_of_workers_are_equal(kernels: CpuKernels, counter: str) -> None:
    for n_workers in WORKERS:
        sizes = (65, 3, 0, 64, 130, 1, 1, 7) if n_workers < 1000 else (65, 3, 64)
        conform(kernels, *counting(counter, n_workers, sizes))
        conform(kernels, *counting(counter, n_workers, sizes, ties=True))
        conform(kernels, *counting(counter, n_workers, sizes, share=0.6))


@pytest.mark.parametrize("counter", COUNTERS)
def test_counts_of_any_size_are_equal(kernels: CpuKernels, counter: str) -> None:
    for sizes in BUCKETS:
        conform(kernels, *counting(counter, 4, sizes, ties=True))
        conform(kernels, *counting(counter, 3, sizes, share=0.7))


@pytest.mark.parametrize("counter", COUNTERS)
def test_counts_of_shards_are_equal(kernels: CpuKernels, counter: str) -> None:
    for n_shards in (2, 3, 7):
        for shard in range(n_shards):
            conform(kernels, *counting(counter, 4, MANY, shard=(shard, n_shards), ties=True))
            conform(kernels, *counting(counter, 5, MANY, shard=(shard, n_shards), share=0.5))


@pytest.mark.parametrize("counter", [name for name in COUNTERS if "levels of" not in name])
def test_a_million_counts_are_equal(kernels: CpuKernels, counter: str) -> None:
    conform(kernels, *counting(counter, 2, BIG))


def test_a_million_counts_of_levels_are_equal(kernels: CpuKernels) -> None:
    conform(kernels, *counting("levels of 3 planes", 2, BIG))


# Committing.

REPLIES = (
    (ReplyFormat.SIGN, 1),
    (ReplyFormat.TERNARY, 2),
    (ReplyFormat.COUNT, 1),
    (ReplyFormat.COUNT, 3),
    (ReplyFormat.COUNT, 13),
)


def committing(
    op: str,
    sizes: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    reply_format: ReplyFormat,
    planes: int,
    *,
    rounding: Coin | None = None,
    wild: bool = False,
) -> tuple[str, Run]:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(sizes, n_shards=2)
        segments: Sequence[Segment] = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        if len(sizes) > 1:
            segments = k.gather(segments)
        reply = m.place(draw_words(g, bucket.n_blocks, planes))
        most = 2**planes - 1 if reply_format is ReplyFormat.COUNT else 1
        present = torch.randint(1, most + 1, (len(sizes),), generator=g).tolist()
        if len(sizes) > 1:
            present[1::4] = [0] * len(present[1::4])
        if op == "update_momentum":
            k.update_momentum(segments, present)
        elif op == "step_alone":
            k.step_alone(segments, rounding=rounding)
        else:
            move = k.commit if op == "commit" else k.apply_reply
            move(segments, present, reply, reply_format=reply_format, rounding=rounding)

    name = f"{op} {tuple(sizes)} {dtypes} {reply_format} {planes} {rounding} wild={wild}"
    return name, run


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(("reply_format", "planes"), REPLIES)
@pytest.mark.parametrize("op", ["commit", "apply_reply"])
def test_replies_are_applied_equally(
    kernels: CpuKernels, op: str, reply_format: ReplyFormat, planes: int, wild: bool
) -> None:
    for sizes, dtypes in SIZES_AND_DTYPES[len(BUCKETS) :] if wild else SIZES_AND_DTYPES:
        for rounding in (None, ROUNDING):
            conform(
                kernels,
                *committing(op, sizes, dtypes, reply_format, planes, rounding=rounding, wild=wild),
            )


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("op", ["update_momentum", "step_alone"])
def test_momenta_and_lone_steps_are_equal(kernels: CpuKernels, op: str, wild: bool) -> None:
    for sizes, dtypes in SIZES_AND_DTYPES:
        for rounding in (None, ROUNDING):
            case = committing(op, sizes, dtypes, ReplyFormat.SIGN, 1, rounding=rounding, wild=wild)
            conform(kernels, *case)


@pytest.mark.parametrize("op", ["commit", "apply_reply", "update_momentum", "step_alone"])
def test_a_million_parameters_move_equally(kernels: CpuKernels, op: str) -> None:
    for reply_format, planes in REPLIES[:4] if op == "commit" else REPLIES[:1]:
        dtypes = (torch.bfloat16, torch.bfloat16)
        conform(kernels, *committing(op, BIG, dtypes, reply_format, planes, rounding=ROUNDING))


def test_every_half_is_widened_and_narrowed_equally(kernels: CpuKernels) -> None:
    """All 2^16 bit patterns as parameters, moved by steps that cross every rounding boundary."""
    for dtype, lr in itertools.product(
        (torch.float16, torch.bfloat16), (0.0, 1e-8, 3e-8, 2.0**-12, 0.0123, 16.0, 70_000.0, 1e38)
    ):

        def run(
            k: Kernels, g: Generator, m: Memory, dtype: torch.dtype = dtype, lr: float = lr
        ) -> None:
            bucket = make_bucket((1 << 16,))
            patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
            momentum = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            segment = Segment(
                bucket.slots[0],
                m.place(patterns),
                m.place(patterns),
                m.place(patterns.to(momentum).flip(0)),
                Coefficients(0.9, 0.99, lr, 0.0),
            )
            reply = draw_words(g, bucket.n_blocks, 1)
            k.commit([segment], [1], reply, reply_format=ReplyFormat.SIGN, rounding=None)

        conform(kernels, f"all {dtype}, lr {lr}", run)


# What holds for all ops.


@pytest.mark.parametrize("encoder", ["signs", "ternary", "levels, 4 planes, l1"])
def test_votes_do_not_depend_on_threads(kernels: CpuKernels, n_threads: int, encoder: str) -> None:
    conform(kernels, *encoding(encoder, THREADED, (torch.float32, torch.bfloat16), wild=True))


@pytest.mark.parametrize("counter", ["signs", "ones", "levels of 3 planes"])
def test_counts_do_not_depend_on_threads(kernels: CpuKernels, n_threads: int, counter: str) -> None:
    conform(kernels, *counting(counter, 17, THREADED, share=0.8))


@pytest.mark.parametrize("op", ["commit", "step_alone"])
def test_moves_do_not_depend_on_threads(kernels: CpuKernels, n_threads: int, op: str) -> None:
    dtypes = (torch.bfloat16, torch.float32)
    case = committing(op, THREADED, dtypes, ReplyFormat.COUNT, 3, rounding=ROUNDING)
    conform(kernels, *case)


def test_digests_do_not_depend_on_threads(kernels: CpuKernels, n_threads: int) -> None:
    for n in (262_143, 262_144, 524_287, 524_288, 786_432, 1_000_001):
        conform(kernels, f"digest {n}", lambda k, g, m, n=n: k.digest(torch.rand(n, generator=g)))


@pytest.mark.parametrize("dtype", PARAM_DTYPES)
def test_square_sums_do_not_depend_on_threads(
    kernels: CpuKernels, n_threads: int, dtype: torch.dtype
) -> None:
    # The last one is more than the plain kernels widen at a time.
    for n in (262_143, 524_288, 528_385, 786_431, 1_060_001):
        conform(
            kernels,
            f"square sums {dtype} {n}, on threads",
            lambda k, g, m, n=n: k.square_sums(m.place(draw(g, n, dtype))),
        )


def test_votes_and_replies_need_not_be_contiguous(kernels: CpuKernels) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(MANY, n_shards=2)
        n_blocks = bucket.n_blocks
        votes = draw_words(g, n_blocks, 6, 2).permute(1, 0, 2, 3)
        present = (torch.rand(len(MANY), 6, generator=g) < 0.7).T
        assert not votes.is_contiguous()
        assert not present.is_contiguous()
        k.count_ternary(votes, present, bucket, 0, out=m.packed(n_blocks, 2))
        strided = votes[:, :, ::2]
        k.count_signs(strided, present, bucket, 0, TIE, out=m.packed(n_blocks, 1))
        k.count_ones(strided, present, bucket, 0, out=m.packed(n_blocks, 3))
        k.count_levels(votes, present, bucket, 0, TIE, out=m.packed(n_blocks, 1))
        reply = draw_words(g, 2, n_blocks).transpose(0, 1)
        segments = make_segments(bucket, g, m)
        k.commit(segments, [1] * 12, reply, reply_format=ReplyFormat.TERNARY, rounding=None)
        reply = draw_words(g, n_blocks, 2)[:, :1]
        k.apply_reply(segments, [1] * 12, reply, reply_format=ReplyFormat.SIGN, rounding=None)

    conform(kernels, "not contiguous", run)


def test_segments_gathered_once_serve_several_steps(kernels: CpuKernels) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> list[list[bool]]:
        bucket = make_bucket(MANY)
        segments = k.gather(make_segments(bucket, g, m, dtypes=(torch.bfloat16, torch.bfloat16)))
        flags = []
        for n_present in (1, 3, 2):  # which also changes a = lr / n
            present = [n_present * (index % 4 != 2) for index in range(len(MANY))]
            flags.append(k.encode_signs(segments, ZERO, out=m.packed(bucket.n_blocks, 1)))
            reply = draw_words(g, bucket.n_blocks, 2)
            k.commit(segments, present, reply, reply_format=ReplyFormat.COUNT, rounding=ROUNDING)
            k.apply_reply(segments, present, reply, reply_format=ReplyFormat.TERNARY, rounding=None)
            k.update_momentum(segments, present)
            k.step_alone(segments, rounding=None)
            flags.append(k.check_finite(segments))
        return flags

    conform(kernels, "gathered", run)


def test_parameters_of_any_shape_that_require_gradients_are_moved(kernels: CpuKernels) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket((60, 1), n_shards=1)
        segments = []
        for slot, shape in zip(bucket.slots, ((3, 4, 5), ()), strict=True):
            param, grad, exp_avg = (m.place(torch.randn(shape, generator=g)) for _ in range(3))
            parameter = torch.nn.Parameter(param)
            segments.append(Segment(slot, parameter, grad, exp_avg, HYPER[0]))
        k.encode_signs(segments, ZERO, out=m.packed(bucket.n_blocks, 1))
        reply = draw_words(g, bucket.n_blocks, 1)
        with torch.no_grad():
            k.commit(segments, [1, 1], reply, reply_format=ReplyFormat.SIGN, rounding=None)

    conform(kernels, "any shape", run)


def test_an_inverted_rounding_coin_is_respected(kernels: CpuKernels) -> None:
    rounding = Coin(ROUNDING.key, inverted=True)
    dtypes = (torch.bfloat16, torch.float32)
    for op in ("commit", "apply_reply", "step_alone"):
        conform(kernels, *committing(op, (65,), dtypes, ReplyFormat.SIGN, 1, rounding=rounding))


def all_ops() -> Iterator[tuple[str, Run]]:
    """One case for each op, many parameters each."""
    dtypes = (torch.bfloat16, torch.float32)
    for encoder in ENCODERS:
        for wild in (False, True):
            yield encoding(encoder, MANY, dtypes, wild=wild)
    for counter in COUNTERS:
        yield counting(counter, 4, MANY, shard=(1, 2), share=0.7)
    for op in ("commit", "apply_reply", "update_momentum", "step_alone"):
        for pair in DTYPES:
            yield committing(op, MANY, pair, ReplyFormat.COUNT, 3, rounding=ROUNDING)
    yield "coin of 100 words", lambda k, g, m: k.coin(TIE, 7, 100, device=CPU)
    for dtype in (*PARAM_DTYPES, torch.uint8):
        yield (
            f"digest of ones, {dtype}",
            lambda k, g, m, d=dtype: k.digest(torch.ones(999, dtype=d)),
        )
    for dtype in PARAM_DTYPES:
        yield (
            f"square sums of ones, {dtype}",
            lambda k, g, m, d=dtype: k.square_sums(torch.ones(4099, dtype=d)),
        )
    yield "checksum", lambda k, g, m: k.checksum(torch.arange(200).view(torch.uint8))


def test_tensors_read_by_their_attributes_give_the_same(kernels: CpuKernels) -> None:
    """Which is how they are read where torch has no exchange table."""
    by_attributes = CpuKernels(kernels.instruction_set)
    by_attributes._core = Core(kernels.instruction_set, None)
    for name, run in all_ops():
        conform(by_attributes, name, run)
        conform(kernels, name, run)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtypes=st.sampled_from(DTYPES),
    n_workers=st.integers(1, 20),
    reply_format=st.sampled_from(ReplyFormat),
    n_shards=st.integers(1, 3),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_step_is_equal_from_the_votes_to_the_commit(
    sizes: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    n_workers: int,
    reply_format: ReplyFormat,
    n_shards: int,
    share: float,
    seed: int,
) -> None:
    bucket = make_bucket(sizes, n_shards)
    planes = {
        ReplyFormat.SIGN: 1,
        ReplyFormat.TERNARY: 2,
        ReplyFormat.COUNT: n_workers.bit_length(),
    }

    def run(k: Kernels, g: Generator, m: Memory) -> list[list[bool]]:
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        workers = [
            [
                segment if present[rank, index] else segment._replace(grad=None)
                for index, segment in enumerate(make_segments(bucket, g, m, dtypes=dtypes))
            ]
            for rank in range(n_workers)
        ]
        votes = m.packed(n_workers, bucket.n_blocks, 1)
        flags = [
            k.encode_signs(segments, Coin(ZERO.key + rank), out=votes[rank])
            for rank, segments in enumerate(workers)
        ]
        reply = m.packed(bucket.n_blocks, planes[reply_format])
        for first in range(0, bucket.n_blocks, bucket.shard_blocks or 1):
            blocks = slice(first, first + bucket.shard_blocks)
            if reply_format is ReplyFormat.COUNT:
                k.count_ones(votes[:, blocks], present, bucket, first, out=reply[blocks])
            else:
                tie = TIE if reply_format is ReplyFormat.SIGN else None
                k.count_signs(votes[:, blocks], present, bucket, first, tie, out=reply[blocks])
        k.commit(
            workers[0],
            present.sum(0).tolist(),
            reply,
            reply_format=reply_format,
            rounding=ROUNDING if seed % 2 else None,
        )
        return flags

    for instruction_set in INSTRUCTION_SETS:
        case = f"step {sizes} {dtypes} {n_workers} {reply_format} {n_shards} {share} {seed}"
        conform(CpuKernels(instruction_set), case, run)

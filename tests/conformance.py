"""One case run by two backends on equal inputs: bitwise identical.

What is compared is all memory that the op could reach, with the elements before and behind every
tensor, and what it returned. Of NaN only the place counts. The inputs of a case follow from its
name.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from backends import CORES, INTERPRETS, TRUTH, Backend
from distlion.kernels import Coefficients, Kernels, Segment
from distlion.kernels.contract import EXP_AVG_DTYPES, PARAM_DTYPES
from distlion.layout import BLOCK_WORDS, BucketLayout, Slot, count_words
from tiers import in_tiers

MANY = (1, 7, 0, 63, 64, 65, 1023, 4099, 512, 8191, 1, 1)
BUCKETS = ((0,), (0, 0), (1,), (7,), (63,), (64,), (65,), (1023,), (4099,), (8191,), MANY)
# A million would take the interpreter minutes.
BIG = (40_003,) if INTERPRETS else (1_000_003,)
# Numbers are cut out of a row of these, which repeats; not in step with words, blocks or pages.
DRAWN_ELEMENTS = 65_537

HYPER = (
    Coefficients(0.9, 0.99, 3e-4, 0.1),
    Coefficients(0.95, 0.98, 0.3, 0.0, grad_scale=1 / 1024),
    # Here directions cancel to 0, and parameters take large steps.
    Coefficients(0.5, 0.0, 40.0, 0.01, grad_scale=1.0),
    Coefficients(0.0, 0.999, 1e-40, 0.0, grad_scale=3.7),
    Coefficients(0.9, 0.95, 1e-3, 0.1, cautious=True),
    # Here gradients are scaled to numbers that are 0 or have no product with a direction.
    Coefficients(0.5, 0.9, 0.3, 0.0, grad_scale=1e-38, cautious=True),
)
DTYPES = tuple(itertools.product(PARAM_DTYPES, EXP_AVG_DTYPES))
# Every size of one parameter, and many parameters in every dtype.
SIZES_AND_DTYPES = (
    *((sizes, DTYPES[index % len(DTYPES)]) for index, sizes in enumerate(BUCKETS)),
    *((MANY, dtypes) for dtypes in DTYPES),
)


def over_sample(argument: str, cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Let a test loop over a third of some cases in the quick tier, over others in the slow one.

    Args:
        argument: What the test calls the cases that it loops over.
        cases: All of them.
    """
    rest = [case for number, case in enumerate(cases) if number % 3]
    parts = [list(cases[::3]), rest]
    return pytest.mark.parametrize(
        argument, in_tiers(parts, lambda part: part is not rest), ids=["sample", "rest"]
    )


class Memory:
    """Tensors at odd places of larger ones; nothing beside them may be written.

    Args:
        device: That of the backend.
        is_aligned: Let tensors begin at multiples of 64 bytes instead, as torch allocates them.
    """

    def __init__(self, device: torch.device, *, is_aligned: bool = False) -> None:
        self.device = device
        self.is_aligned = is_aligned
        self.buffers: list[Tensor] = []

    def place(self, values: Tensor, device: torch.device | None = None) -> Tensor:
        """Put them on the backend's device, if on no other."""
        offset = 64 if self.is_aligned else 1 + 2 * (len(self.buffers) % 5)
        size = (values.numel() + 128,)
        buffer = torch.full(size, 1, dtype=values.dtype, device=device or self.device)
        place = buffer[offset : offset + values.numel()].view(values.shape)
        place.copy_(values)
        self.buffers.append(buffer)
        return place

    def packed(self, *shape: int) -> Tensor:
        """Make a packed tensor full of garbage."""
        return self.place(torch.full((*shape, BLOCK_WORDS), 0x5A5A_F0F0_1234_5677))


Run = Callable[[Kernels, Generator, Memory], Tensor | Sequence[Tensor] | None]
_expected: dict[tuple[str, bool], tuple[list[Tensor], list[Tensor]]] = {}


def run_case(
    backend: Backend, case: str, run: Run, *, is_aligned: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results, and the memory that they were made in."""
    memory = Memory(backend.device, is_aligned=is_aligned)
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    result = run(backend.kernels, generator, memory)
    results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    for place, tensor in enumerate(results):
        assert tensor.device.type == backend.device.type, f"{backend}, {case}, result {place}"
    return results, memory.buffers


def conform(backend: Backend, case: str, run: Run, *, is_aligned: bool = False) -> list[Tensor]:
    """Run a case with the reference on the CPU and with a backend, and compare.

    Args:
        backend: What to compare.
        case: Its name, from which its inputs follow.
        run: What to run.
        is_aligned: Where ``Memory`` puts tensors.

    Returns:
        What the op returned.
    """
    key = (case, is_aligned)
    if key not in _expected:
        _expected[key] = run_case(TRUTH, case, run, is_aligned=is_aligned)
    expected = _expected[key]
    if backend is CORES[-1]:
        del _expected[key]
    found = run_case(backend, case, run, is_aligned=is_aligned)
    for what, ours, theirs in zip(("result", "buffer"), expected, found, strict=True):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            difference = find_difference(one, other)
            assert not difference, f"{backend}, {case}, {what} {place}: {difference}"
    return expected[0]


def find_difference(expected: Tensor, actual: Tensor) -> str:
    form, found = (expected.dtype, expected.shape), (actual.dtype, actual.shape)
    if form != found:
        return f"expected {form}, got {found}"
    actual = actual.cpu()
    if torch.equal(*(each.view(-1).view(torch.uint8) for each in (expected, actual))):
        return ""
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


def make_bucket(sizes: Sequence[int], n_shards: int = 1) -> BucketLayout:
    """Make a bucket of parameters, many of which start within a word of the coins."""
    words = [count_words(size) for size in sizes]
    starts = itertools.accumulate(words[:-1], initial=0)
    slots = [
        Slot(f"p{index}", size, start + 999_999_937, start, (37 * index + size) % 64)
        for index, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    return BucketLayout(0, tuple(range(len(sizes))), tuple(slots), n_shards)


def draw(generator: Generator, n: int, dtype: torch.dtype, *, wild: bool = False) -> Tensor:
    """Draw numbers of many sizes with zeros, denormals and huge ones; wild: up to inf and NaN."""
    start = int(torch.randint(DRAWN_ELEMENTS, (), generator=generator))
    row = _draw_row(dtype, wild)
    if start + n > len(row):
        row = row[:DRAWN_ELEMENTS].repeat(-(-(start + n) // DRAWN_ELEMENTS))
    return row[start : start + n].clone()


@functools.cache
def _draw_row(dtype: torch.dtype, wild: bool) -> Tensor:
    """Draw numbers once for all cases, as they cost most of their time; the row comes twice."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{dtype} {wild}".encode()))
    n = DRAWN_ELEMENTS
    limits = torch.finfo(dtype)
    denormal = limits.tiny * limits.eps
    edges = [0.0, -0.0, denormal, -3 * denormal, limits.tiny, -limits.tiny, limits.max / 8, 1.0]
    if wild:
        edges += [limits.max, limits.min, float("inf"), -float("inf"), float("nan")]
    edge = torch.tensor(edges, dtype=torch.float64).to(dtype)
    choice = torch.randint(0, len(edges), (n,), generator=generator)
    scale = torch.exp(4 * torch.randn(n, generator=generator)).clamp(max=1000)
    usual = (torch.randn(n, generator=generator) * scale).to(dtype)
    row = torch.where(torch.rand(n, generator=generator) < 0.25, edge[choice], usual)
    return row.repeat(2)


def make_segments(
    bucket: BucketLayout,
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
    """Draw packed bits, on the CPU."""
    low = torch.randint(-(2**63), 2**63 - 1, (*shape, BLOCK_WORDS), generator=generator)
    return low ^ torch.randint(0, 2, low.shape, generator=generator)

"""Every backend moves parameters and momenta as the reference does: bitwise identical."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Generator

from backends import Backend, over_cores, over_others
from conformance import (
    BIG,
    BUCKETS,
    SIZES_AND_DTYPES,
    Memory,
    conform,
    draw_words,
    make_bucket,
    over_sample,
)
from distlion.kernels import Coefficients, Coin, Kernels, ReplyFormat, Segment
from kernel_cases import MOVES, REPLIES, ROUNDING, committing, moving_outwards

OF_ONE, OF_MANY = SIZES_AND_DTYPES[: len(BUCKETS)], SIZES_AND_DTYPES[len(BUCKETS) :]
ROUNDED = (
    *((case, (None, ROUNDING)[number % 2]) for number, case in enumerate(OF_ONE)),
    *itertools.product(OF_MANY, (None, ROUNDING)),
)
"""Sizes of one parameter take turns in how they are rounded; many parameters take both ways."""


@over_others
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(("reply_format", "planes"), REPLIES)
@pytest.mark.parametrize("op", ["commit", "commit without gradients"])
@over_sample("cases", ROUNDED)
def test_replies_are_applied_equally(
    cases: Sequence[Any],
    op: str,
    reply_format: ReplyFormat,
    planes: int,
    wild: bool,
    backend: Backend,
) -> None:
    for (sizes, dtypes), rounding in cases:
        conform(
            backend,
            *committing(op, sizes, dtypes, reply_format, planes, rounding=rounding, wild=wild),
        )


@over_others
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("op", ["update_momentum", "step_alone"])
@over_sample("cases", ROUNDED)
def test_momenta_and_lone_steps_are_equal(
    cases: Sequence[Any], op: str, wild: bool, backend: Backend
) -> None:
    for (sizes, dtypes), rounding in cases:
        case = committing(op, sizes, dtypes, ReplyFormat.SIGN, 1, rounding=rounding, wild=wild)
        conform(backend, *case)


@over_others
@pytest.mark.parametrize("op", MOVES)
def test_a_million_parameters_move_equally(op: str, backend: Backend) -> None:
    for reply_format, planes in REPLIES[:4] if op == "commit" else REPLIES[:1]:
        dtypes = (torch.bfloat16, torch.bfloat16)
        conform(backend, *committing(op, BIG, dtypes, reply_format, planes, rounding=ROUNDING))


@over_others
@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_momenta_move_equally(nesterov: bool, backend: Backend) -> None:
    for sizes in (*BUCKETS, (4095, 4096, 4097), BIG, ()):
        conform(backend, *moving_outwards(sizes, nesterov=nesterov))
        conform(backend, *moving_outwards(sizes, nesterov=nesterov, wild=True))


@over_cores
@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_momenta_do_not_depend_on_threads(
    nesterov: bool, n_threads: int, backend: Backend
) -> None:
    conform(backend, *moving_outwards((800_001, 5, 262_209), nesterov=nesterov))


@over_others
def test_every_half_is_widened_and_narrowed_equally(backend: Backend) -> None:
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
            reply = m.place(draw_words(g, bucket.n_blocks, 1))
            k.commit([segment], [1], reply, reply_format=ReplyFormat.SIGN, rounding=None)

        conform(backend, f"all {dtype}, lr {lr}", run)


@over_others
def test_an_inverted_rounding_coin_is_respected(backend: Backend) -> None:
    rounding = Coin(ROUNDING.key, inverted=True)
    dtypes = (torch.bfloat16, torch.float32)
    for op in ("commit", "commit without gradients", "step_alone"):
        conform(backend, *committing(op, (65,), dtypes, ReplyFormat.SIGN, 1, rounding=rounding))


@over_others
def test_parameters_of_any_shape_that_require_gradients_are_moved(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket((60, 1), n_shards=1)
        shapes: Sequence[tuple[int, ...]] = ((3, 4, 5), ())
        segments = []
        for slot, shape in zip(bucket.slots, shapes, strict=True):
            param, grad, exp_avg = (m.place(torch.randn(shape, generator=g)) for _ in range(3))
            parameter = torch.nn.Parameter(param)
            segments.append(
                Segment(slot, parameter, grad, exp_avg, Coefficients(0.9, 0.99, 3e-4, 0.1))
            )
        k.encode_signs(segments, ROUNDING, out=m.packed(bucket.n_blocks, 1))
        reply = m.place(draw_words(g, bucket.n_blocks, 1))
        with torch.no_grad():
            k.commit(segments, [1, 1], reply, reply_format=ReplyFormat.SIGN, rounding=None)

    conform(backend, "any shape", run)

"""Every backend encodes what the reference on the CPU does: bitwise identical."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from backends import Backend, over_others
from conformance import (
    BIG,
    DTYPES,
    MANY,
    SIZES_AND_DTYPES,
    Memory,
    conform,
    make_bucket,
    make_segments,
    over_sample,
)
from distlion.kernels import Coefficients, Kernels, Segment
from distlion.kernels.contract import EXP_AVG_DTYPES
from kernel_cases import ENCODERS, encoding, levels_encoder

over_encoders = pytest.mark.parametrize("encoder", ENCODERS)


@over_others
@over_encoders
@over_sample("cases", SIZES_AND_DTYPES)
def test_votes_are_equal(cases: Sequence[Any], encoder: str, backend: Backend) -> None:
    for sizes, dtypes in cases:
        flags, checks = conform(backend, *encoding(encoder, sizes, dtypes, wild=False))
        assert flags.all(), "these cases are to test votes"
        assert checks.all()


@over_others
@over_encoders
@over_sample("pairs", DTYPES)
def test_votes_are_equal_where_numbers_are_not_finite(
    pairs: Sequence[Any], encoder: str, backend: Backend
) -> None:
    for dtypes in pairs:
        conform(backend, *encoding(encoder, (65,), dtypes, wild=True))
        flags, _ = conform(backend, *encoding(encoder, MANY, dtypes, wild=True))
        assert not flags.all(), "these cases are to test what is not finite"


@over_others
def test_an_overflow_is_told_although_its_direction_is_masked(backend: Backend) -> None:
    """The momentum is finite, and the direction until it is rounded to bfloat16."""
    planes, encode = ENCODERS["directions in bfloat16"]

    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        bucket = make_bucket((200,))
        exp_avg = torch.zeros(200)
        exp_avg[77] = 3.4e38
        segment = Segment(
            bucket.slots[0],
            m.place(torch.zeros(200)),
            m.place(-torch.ones(200)),
            m.place(exp_avg),
            Coefficients(0.9999, 0.5, 0.1, 0.0, cautious=True),
        )
        return encode(k, [segment], m.packed(bucket.n_blocks, planes))

    (flags,) = conform(backend, "masked overflow", run)
    assert not flags.any()


@over_others
@over_encoders
def test_a_million_votes_are_equal(encoder: str, backend: Backend) -> None:
    conform(backend, *encoding(encoder, BIG, (torch.bfloat16, torch.float32), wild=False))


@over_others
@pytest.mark.parametrize("norm", ["l1", "linf"])
def test_levels_of_all_widths_are_equal(norm: str, backend: Backend) -> None:
    for planes, step in itertools.product(range(1, 9), (1e-3, 0.25, 1.0, 1e30, 1e-320)):

        def run(
            k: Kernels, g: Generator, m: Memory, planes: int = planes, step: float = step
        ) -> Tensor:
            bucket = make_bucket((8191, 64, 1))
            segments = make_segments(bucket, g, m)
            for segment in segments:  # without the huge ones, which hide all others
                assert segment.grad is not None
                segment.grad.clamp_(-100, 100)
                segment.exp_avg.clamp_(-100, 100)
            return levels_encoder(norm, step)(k, segments, m.packed(bucket.n_blocks, planes))

        conform(backend, f"levels {norm}, {planes} planes of {step}", run)


@over_others
def test_levels_of_zeros_and_of_denormals_are_equal(backend: Backend) -> None:
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
        ) -> Tensor:
            bucket = make_bucket((4096, 5000))
            segments = make_segments(bucket, g, m)
            for segment in segments:
                assert segment.grad is not None
                segment.grad.fill_(value)
                segment.exp_avg.fill_(value)
            return levels_encoder(norm, step)(k, segments, m.packed(bucket.n_blocks, 8))

        conform(backend, f"levels of {value!r}, {norm}, {step}", run)


@over_others
@over_encoders
@pytest.mark.parametrize("exp_avg_dtype", EXP_AVG_DTYPES)
def test_the_edge_of_infinity_is_where_rounding_puts_it(
    exp_avg_dtype: torch.dtype, encoder: str, backend: Backend
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

        def run(k: Kernels, g: Generator, m: Memory, bits: int = bits) -> Tensor:
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

        conform(backend, f"edge {encoder} {exp_avg_dtype} {bits:x}", run)


@over_others
@over_encoders
def test_flags_of_no_segments_are_none(encoder: str, backend: Backend) -> None:
    planes, encode = ENCODERS[encoder]

    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        return encode(k, [], m.packed(2, planes))

    (flags,) = conform(backend, f"{encoder} of nothing", run)
    assert flags.shape == (0,)
    assert backend.kernels.check_finite([]).shape == (0,)

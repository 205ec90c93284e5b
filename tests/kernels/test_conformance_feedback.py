"""Every backend encodes rests and lots, adds and counts steps as the reference: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from backends import Backend, over_cores, over_others
from conformance import (
    BIG,
    BUCKETS,
    DTYPES,
    MANY,
    SIZES_AND_DTYPES,
    Memory,
    conform,
    make_bucket,
    make_segments,
    over_sample,
)
from distlion.kernels import BlockVotes, Coefficients, Kernels, Segment
from kernel_cases import (
    BOUNDS,
    ZERO,
    Kept,
    draw_estimates,
    drawing,
    resting,
    stepping,
    stepping_all,
    summing,
)
from tiers import in_tiers

# One block of a scale, more, and less; 4,133 is a prime above 4,096.
SIZES = (0, 1, 63, 64, 65, 4095, 4096, 4097, 4133, 20_011)
# Threads get 262,144 elements at least: this is enough for three, with cuts inside parameters.
THREADED = (600_001, 5, 64, 200_003, 82_000)
# For c = g.
PLAIN = Coefficients(0.0, 0.0, 0.1, 0.0)
# Enough blocks for sums of sums.
HIGH = 1 << 16

over_bits = pytest.mark.parametrize("bits", [1, 2])
over_kept = pytest.mark.parametrize("kept", ["estimates", "residuals", "nothing"])
over_bounds = pytest.mark.parametrize("bound", list(BOUNDS))


@over_others
@over_kept
@over_bits
@over_sample("cases", (*SIZES_AND_DTYPES, *((SIZES, dtypes) for dtypes in DTYPES)))
def test_votes_on_rests_are_equal(
    cases: Sequence[Any], bits: int, kept: Kept, backend: Backend
) -> None:
    for sizes, dtypes in cases:
        flags, _ = conform(backend, *resting(bits, sizes, dtypes, wild=False, kept=kept))
        assert flags.all(), "these cases are to test votes"


@over_others
@over_kept
@over_bits
@over_sample("pairs", DTYPES)
def test_votes_on_rests_are_equal_where_numbers_are_not_finite(
    pairs: Sequence[Any], bits: int, kept: Kept, backend: Backend
) -> None:
    for dtypes in pairs:
        conform(backend, *resting(bits, (65,), dtypes, wild=True, kept=kept))
        flags, _ = conform(backend, *resting(bits, MANY, dtypes, wild=True, kept=kept))
        assert not flags.all(), "these cases are to test what is not finite"


@over_others
@over_kept
@over_bits
def test_votes_on_rests_of_a_million_are_equal(bits: int, kept: Kept, backend: Backend) -> None:
    conform(backend, *resting(bits, BIG, (torch.bfloat16, torch.float32), wild=False, kept=kept))


@over_cores
@over_kept
@over_bits
def test_votes_on_rests_do_not_depend_on_threads(
    bits: int, kept: Kept, n_threads: int, backend: Backend
) -> None:
    dtypes = (torch.float16, torch.bfloat16)
    conform(backend, *resting(bits, THREADED, dtypes, wild=False, kept=kept))


# Stochastic signs.


DRAWN = (
    *((sizes, dtypes, False) for sizes, dtypes in SIZES_AND_DTYPES),
    *((SIZES, dtypes, False) for dtypes in DTYPES),
    *((MANY, dtypes, True) for dtypes in DTYPES),
    (BIG, (torch.bfloat16, torch.float32), False),
)


@over_others
@over_bounds
@over_sample("cases", DRAWN)
def test_stochastic_signs_are_equal(cases: Sequence[Any], bound: str, backend: Backend) -> None:
    for sizes, dtypes, wild in cases:
        conform(backend, *drawing(bound, sizes, dtypes, wild=wild))


@over_cores
@over_bounds
def test_stochastic_signs_do_not_depend_on_threads(
    bound: str, n_threads: int, backend: Backend
) -> None:
    conform(backend, *drawing(bound, THREADED, (torch.float32, torch.bfloat16), wild=False))


def make_rests(rests: list[Tensor], m: Memory) -> tuple[list[Segment], list[Tensor]]:
    """Make segments whose rests these are."""
    segments = [
        Segment(slot, m.place(torch.zeros(rest.numel())), m.place(rest), m.place(rest), PLAIN)
        for slot, rest in zip(make_bucket([len(r) for r in rests]).slots, rests, strict=True)
    ]
    return segments, [m.place(torch.zeros(rest.numel())) for rest in rests]


def draw_tie(n: int, g: Generator) -> Tensor:
    """Draw n sizes whose mean lies between two floats; the last bit of their sum decides.

    1 + 2**-24, and 3 * 2**-54, which is lost unless the three are added up before they meet the 1.
    """
    sizes = torch.zeros(n)
    sizes[torch.randperm(n, generator=g)[:5]] = torch.tensor([1.0, 2**-24, *[2**-54] * 3])
    return sizes


@over_others
@over_bits
@pytest.mark.parametrize(
    ("n", "trials"), in_tiers([(4096, 60), (HIGH, 40)], lambda case: case[0] < HIGH)
)
def test_sums_are_the_same_tree(n: int, trials: int, bits: int, backend: Backend) -> None:
    if backend.is_interpreted:
        pytest.skip("its sums are plain torch, its directions slow")

    def draw_rest(g: Generator) -> Tensor:
        rest = draw_tie(n, g)
        if bits == 2:  # those of the small ones, among as many large ones
            rest = torch.cat([rest, torch.full((n,), 1024.0)])[torch.randperm(2 * n, generator=g)]
        return rest

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        segments, estimates = make_rests([draw_rest(g) for _ in range(trials)], m)
        scales = m.place(torch.empty(trials, bits))
        out = m.packed(trials * bits * n // 512, bits)
        return k.encode_rests(segments, estimates, ZERO, out=out, scales=scales), scales

    _, scales = conform(backend, f"tree of {n}, {bits} bits", run)
    assert len(set(scales[:, 0].tolist())) == 2, "the last bit is to decide"


@over_others
def test_rests_of_one_size_are_all_large(backend: Backend) -> None:
    values = (0.0, 1.0, 1e-45, 1.1, 3e38)

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        signs = torch.randint(0, 2, (5000,), generator=g) * 2.0 - 1
        segments, estimates = make_rests([signs * value for value in values], m)
        scales = m.place(torch.empty(len(values), 2))
        out = m.packed(60, 2)
        return k.encode_rests(segments, estimates, ZERO, out=out, scales=scales), scales

    _, scales = conform(backend, "rests of one size", run)
    assert torch.equal(scales, torch.tensor([[0.0, value] for value in values]))


@over_others
@over_bits
def test_rests_from_estimates_that_are_not_finite_are_told(bits: int, backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        bucket = make_bucket((100, 5000, 70))
        segments = make_segments(bucket, g, m)
        estimates = draw_estimates(segments, g, m)
        for estimate, special in zip(estimates, ("inf", "nan", "-inf"), strict=True):
            estimate[estimate.numel() // 2] = float(special)
        scales = m.place(torch.zeros(3, bits))
        out = m.packed(bucket.n_blocks, bits)
        return k.encode_rests(segments, estimates, ZERO, out=out, scales=scales), scales

    flags, scales = conform(backend, f"estimates, {bits} bits", run)
    assert not flags.any()
    assert not scales.any()


@over_others
@over_bits
def test_there_may_be_no_segments(bits: int, backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        scales = m.place(torch.zeros(0, bits))
        votes = m.packed(2, bits)
        flags = k.encode_rests([], [], ZERO, out=votes, scales=scales).clone()
        k.move_residuals([], [], votes, scales, flags)
        k.add_steps([], make_bucket(MANY).slots, [], votes, scales)
        drawn = m.packed(2, 1)
        lots = k.encode_lots([], ZERO, out=drawn, scales=m.place(torch.zeros(0, 1)))
        return [flags, lots.clone(), drawn]

    conform(backend, f"rests of nothing, {bits} bits", run)


# Steps.


@over_others
@over_bits
def test_estimates_after_a_vote_are_equal(bits: int, backend: Backend) -> None:
    for sizes in (SIZES, MANY, BIG):
        conform(backend, *stepping(bits, sizes))
        conform(backend, *stepping(bits, sizes, share=0.5))


@over_cores
@over_bits
def test_estimates_without_a_vote_stay_as_they_are(bits: int, backend: Backend) -> None:
    estimates, slots = [torch.ones(3), torch.ones(0), torch.ones(3)], make_bucket((3, 0, 3)).slots
    votes, scales = torch.zeros(1, bits, 8, dtype=torch.int64), torch.ones(3, bits)
    backend.kernels.add_steps(estimates, slots, [True, True, False], votes, scales)
    assert torch.equal(torch.cat(estimates), torch.tensor([0.0, 0, 0, 1, 1, 1]))


@over_others
@over_bits
def test_estimates_of_all_workers_are_equal(bits: int, backend: Backend) -> None:
    for n_workers in (1, 3):
        conform(backend, *stepping_all(bits, n_workers, SIZES))
        conform(backend, *stepping_all(bits, n_workers, MANY, share=0.5))
    conform(backend, *stepping_all(bits, 0, MANY))
    for n_shards in (2, 3, 7):
        for shard in range(n_shards):
            conform(backend, *stepping_all(bits, 3, SIZES, shard=(shard, n_shards), share=0.7))


@over_others
def test_what_all_workers_said_need_not_be_contiguous(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> Tensor:
        bucket = make_bucket((700, 65))
        n_blocks = bucket.n_blocks
        estimates = m.place(torch.rand(3, 512 * n_blocks, generator=g))
        votes = m.packed(n_blocks, 3, 2).transpose(0, 1)
        scales = m.place(torch.rand(2, 2, 3, generator=g)).permute(2, 0, 1)
        present = (torch.rand(2, 3, generator=g) < 0.7).T
        said = BlockVotes(votes, present, bucket, 0)
        out, sums = m.packed(n_blocks, 1), m.place(torch.zeros(1, 2, dtype=torch.float64))
        k.count_steps(
            said, scales, ZERO, weights=(1, 2, 1), estimates=estimates, out=out, sums=sums
        )
        k.add_steps_of_all(estimates, said, scales)
        return [estimates, out, sums]

    conform(backend, "steps, not contiguous", run)


@over_others
@over_bits
@pytest.mark.parametrize("has_estimates", [False, True])
def test_counts_of_steps_are_equal(bits: int, has_estimates: bool, backend: Backend) -> None:
    options = {"has_estimates": has_estimates}
    for weights in ((1,), (1, 1), (1, 3, 1, 1), (255, 1, 7)):
        conform(backend, *summing(bits, weights, SIZES, **options))
        conform(backend, *summing(bits, weights, MANY, share=0.4, wild=True, **options))
    for sizes in BUCKETS:
        conform(backend, *summing(bits, (1, 1, 1), sizes, share=0.8, **options))
    for shards in ((0, 2, 2), (1, 2, 2), (0, 3, 3), (1, 3, 3), (2, 7, 7)):
        conform(backend, *summing(bits, (1, 2, 1), SIZES, shards=shards, share=0.7, **options))
    conform(backend, *summing(bits, (1, 1), BIG, **options))


@over_cores
@over_bits
@pytest.mark.parametrize("has_estimates", [False, True])
def test_counts_of_steps_do_not_depend_on_threads(
    bits: int, has_estimates: bool, n_threads: int, backend: Backend
) -> None:
    case = summing(bits, (1, 2, 1), THREADED, share=0.8, has_estimates=has_estimates)
    conform(backend, *case)


@over_cores
@over_bits
def test_steps_do_not_depend_on_threads(bits: int, n_threads: int, backend: Backend) -> None:
    conform(backend, *stepping(bits, THREADED, share=0.8))
    conform(backend, *stepping_all(bits, 2, THREADED, share=0.8))


@over_others
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    bits=st.integers(1, 2),
    n_workers=st.integers(1, 4),
    n_shards=st.integers(1, 3),
    shard=st.integers(0, 2),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=10, derandomize=True)
def test_feedback_of_any_bucket_is_equal(
    sizes: list[int],
    bits: int,
    n_workers: int,
    n_shards: int,
    shard: int,
    share: float,
    seed: int,
    backend: Backend,
) -> None:
    dtypes = DTYPES[seed % len(DTYPES)]
    for name, run in (
        resting(bits, sizes, dtypes, wild=seed % 3 == 0),
        resting(bits, sizes, dtypes, wild=seed % 3 == 0, kept="residuals"),
        drawing("largest", sizes, dtypes, wild=seed % 3 == 0),
        summing(
            bits,
            [1 + seed % (2 + worker) for worker in range(n_workers)],
            sizes,
            shards=(shard % n_shards, n_shards, n_shards),
            share=share,
            has_estimates=seed % 2 == 0,
        ),
        stepping(bits, sizes, share=share),
        stepping_all(bits, n_workers, sizes, shard=(shard % n_shards, n_shards), share=share),
    ):
        conform(backend, f"{name} {seed}", run)

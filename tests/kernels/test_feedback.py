"""What votes with error feedback say, by a plain loop over elements; and that steps only add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from distlion.kernels import BlockVotes, Coefficients, Coins, Kernels, Segment, choose_kernels
from distlion.kernels.contract import FLOAT_PLANES
from distlion.kernels.counting import count_estimates
from distlion.kernels.words import split_planes, unpack
from distlion.layout import BLOCK_WORDS, BucketLayout, fill_buckets, place_parameters

KERNELS = choose_kernels(torch.device("cpu"))
COINS = Coins(seed=4, step=7, voter=1)
HYPER = Coefficients(0.9, 0.99, 1e-3, 0.0)
# The direction is the gradient.
FIRST = Coefficients(0.0, 0.9, 1e-3, 0.0)
# 4,133 is a prime above 4,096; 0 is a shard of a small parameter.
SIZES = (1, 7, 64, 65, 0, 1023, 4133)
N_WORKERS = 3


def make_bucket() -> BucketLayout:
    slots = place_parameters([f"p{n}" for n in SIZES], list(SIZES))
    places, word = [], 0
    for slot in slots:
        places.append(slot._replace(bucket_word=word))
        word += slot.n_words
    return BucketLayout(0, tuple(range(len(SIZES))), tuple(places), N_WORKERS)


def draw(n: int, seed: int) -> Tensor:
    """Long-tailed numbers, a fifth of them exactly 0."""
    values = torch.from_numpy(oracle.values(seed, n=max(1, n)).copy())[:n]
    values[::5] = 0
    return values


def make_segments(bucket: BucketLayout, *, absent: int | None = None) -> list[Segment]:
    return [
        Segment(
            slot,
            torch.zeros(slot.n_elements),
            None if index == absent else draw(slot.n_elements, 10 + index),
            draw(slot.n_elements, 30 + index),
            HYPER,
        )
        for index, slot in enumerate(bucket.slots)
    ]


def make_estimates(segments: list[Segment]) -> list[Tensor]:
    """Where an element's place is even, exactly the direction: nothing is left to say."""
    estimates = []
    for index, segment in enumerate(segments):
        values = draw(segment.slot.n_elements, 50 + index)
        if segment.grad is not None:
            values[::2] = torch.from_numpy(direction(segment))[::2]
        estimates.append(values)
    return estimates


def direction(segment: Segment) -> oracle.F32:
    assert segment.grad is not None
    return oracle.weighted_sum(0.9, segment.exp_avg.numpy(), segment.grad.numpy())


def encode(
    bucket: BucketLayout, segments: list[Segment], estimates: list[Tensor], bits: int
) -> tuple[Tensor, Tensor, list[bool]]:
    votes = torch.full((bucket.n_blocks, bits, BLOCK_WORDS), -1, dtype=torch.int64)
    scales = torch.full((len(segments), bits), torch.nan)
    finite = KERNELS.encode_rests(segments, estimates, COINS.zero, out=votes, scales=scales)
    return votes, scales, finite.tolist()


@pytest.mark.parametrize("bits", [1, 2])
def test_a_vote_says_what_the_oracle_says_of_the_rest(bits: int) -> None:
    bucket = make_bucket()
    segments = make_segments(bucket, absent=2)
    estimates = make_estimates(segments)
    before = [estimate.clone() for estimate in estimates]

    votes, scales, finite = encode(bucket, segments, estimates, bits)
    assert all(map(torch.equal, estimates, before))
    present = [segment.grad is not None for segment in segments]
    KERNELS.add_steps(estimates, bucket.slots, present, votes, scales)

    assert all(finite)
    for index, (segment, slot) in enumerate(zip(segments, bucket.slots, strict=True)):
        if segment.grad is None:
            assert torch.equal(estimates[index], before[index])
            assert not scales[index].any()
            continue
        if not slot.n_elements:
            continue
        said = before[index].numpy()
        zeros = oracle.signs_by_coin(4, 7, 3, slot.first_word, slot.n_elements)
        rest = direction(segment) - said
        assert slot.n_elements == 1 or (rest == 0).any()
        expected = said + oracle.feedback_step(rest, bits, zeros)
        assert np.array_equal(oracle.bits_of(estimates[index].numpy()), oracle.bits_of(expected))


@pytest.mark.parametrize("bits", [1, 2])
def test_residuals_keep_what_the_oracle_says_that_a_vote_left_out(bits: int) -> None:
    bucket = make_bucket()
    segments = make_segments(bucket, absent=2)
    segments[3].grad[0] = torch.inf  # type: ignore[index]
    residuals = [draw(slot.n_elements, 70 + n) for n, slot in enumerate(bucket.slots)]
    before = [residual.clone() for residual in residuals]
    votes = torch.full((bucket.n_blocks, bits, BLOCK_WORDS), -1, dtype=torch.int64)
    scales = torch.full((len(segments), bits), torch.nan)
    said = {"out": votes, "scales": scales}
    finite = KERNELS.encode_rests(segments, residuals, COINS.zero, **said, are_residuals=True)
    KERNELS.move_residuals(segments, residuals, votes, scales, finite)

    for index, (segment, slot) in enumerate(zip(segments, bucket.slots, strict=True)):
        if index in (2, 3):  # without a vote
            assert torch.equal(residuals[index], before[index])
        elif slot.n_elements:
            c, e = direction(segment), before[index].numpy()
            zeros = oracle.signs_by_coin(4, 7, 3, slot.first_word, slot.n_elements)
            expected = c - (oracle.feedback_step(c + e, bits, zeros) - e)
            found = residuals[index].numpy()
            assert np.array_equal(oracle.bits_of(found), oracle.bits_of(expected))


def test_an_element_as_large_as_the_mean_is_a_large_one() -> None:
    (slot,) = place_parameters(["three"], [3])
    rest = torch.tensor([1.0, -2.0, 3.0])
    segment = Segment(slot, torch.zeros(3), rest, torch.zeros(3), FIRST)
    votes, scales = torch.empty(1, 2, BLOCK_WORDS, dtype=torch.int64), torch.empty(1, 2)
    KERNELS.encode_rests([segment], [torch.zeros(3)], COINS.zero, out=votes, scales=scales)
    assert scales.tolist() == [[1.0, 2.5]]
    estimate = torch.zeros(3)
    KERNELS.add_steps([estimate], [slot], [True], votes, scales)
    assert estimate.tolist() == [1.0, -2.5, 2.5]


def test_two_bits_leave_less_than_one() -> None:
    bucket = make_bucket()
    segments = make_segments(bucket)
    left = []
    for bits in (1, 2):
        after = [torch.zeros(slot.n_elements) for slot in bucket.slots]
        votes, scales, _ = encode(bucket, segments, after, bits)
        KERNELS.add_steps(after, bucket.slots, [True] * len(SIZES), votes, scales)
        left.append(float((torch.from_numpy(direction(segments[-1])) - after[-1]).norm()))
    start = float(np.linalg.norm(direction(segments[-1])))
    assert left[1] < left[0] < start


@pytest.mark.parametrize("bits", [1, 2])
def test_what_is_not_finite_says_nothing(bits: int) -> None:
    bucket = make_bucket()
    segments = make_segments(bucket)
    segments[3].grad[0] = torch.inf  # type: ignore[index]
    votes, scales, finite = encode(bucket, segments, make_estimates(segments), bits)
    assert finite == [index != 3 for index in range(len(SIZES))]
    slot = bucket.slots[3]
    words = split_planes(votes)[:, slot.bucket_word : slot.bucket_word + slot.n_words]
    assert not words.any()
    assert not scales[3].any()
    assert scales[6].all()


@pytest.mark.parametrize("bits", [1, 2])
def test_a_rest_beyond_the_range_of_a_float_is_told(bits: int) -> None:
    (slot,) = place_parameters(["far"], [70])
    segment = Segment(slot, torch.zeros(70), torch.full((70,), -3e38), torch.zeros(70), FIRST)
    votes = torch.full((1, bits, BLOCK_WORDS), -1, dtype=torch.int64)
    scales = torch.full((1, bits), torch.nan)
    far = [torch.full((70,), 3e38)]
    for kernels in (KERNELS, Kernels()):
        finite = kernels.encode_rests([segment], far, COINS.zero, out=votes, scales=scales)
        assert finite.tolist() == [False]
        assert not votes.any()
        assert not scales.any()


@pytest.mark.parametrize("bits", [1, 2])
def test_who_counts_follows_every_worker_block_by_block(bits: int) -> None:
    """As each worker's own estimates move, so do the copies of who counts: bitwise."""
    bucket = make_bucket()
    everybody = torch.zeros(N_WORKERS, 512 * bucket.n_blocks)
    votes, scales, after = [], [], []
    present = torch.ones(N_WORKERS, len(SIZES), dtype=torch.bool)
    present[1, 5] = False
    for worker in range(N_WORKERS):
        segments = make_segments(bucket, absent=5 if worker == 1 else None)
        estimates = [each * (worker + 1) for each in make_estimates(segments)]
        said, found, _ = encode(bucket, segments, estimates, bits)
        votes.append(said)
        scales.append(found)
        place(bucket, estimates, everybody[worker])
        KERNELS.add_steps(estimates, bucket.slots, present[worker].tolist(), said, found)
        after.append(estimates)
    expected = torch.zeros_like(everybody)
    for worker in range(N_WORKERS):
        place(bucket, after[worker], expected[worker])
    # What lies in the place of an absent worker's vote is not read.
    scales[1][5] = torch.inf

    for first in range(0, bucket.n_blocks, bucket.shard_blocks):
        blocks = slice(first, first + bucket.shard_blocks)
        elements = slice(512 * first, 512 * (first + bucket.shard_blocks))
        found = everybody[:, elements].contiguous()
        KERNELS.add_steps_of_all(
            found,
            BlockVotes(torch.stack(votes)[:, blocks].contiguous(), present, bucket, first),
            torch.stack(scales),
        )
        assert torch.equal(found, expected[:, elements])


def place(bucket: BucketLayout, values: list[Tensor], out: Tensor) -> None:
    for slot, value in zip(bucket.slots, values, strict=True):
        start = 64 * slot.bucket_word
        out[start : start + slot.n_elements] = value


def test_the_reply_is_the_sign_of_all_estimates_those_of_absent_workers_too() -> None:
    slots = place_parameters(["a", "b"], [130, 5])
    (bucket,) = fill_buckets(slots, [0, 0], n_shards=1, bucket_elements=1000)
    estimates = torch.zeros(2, 512 * bucket.n_blocks)
    estimates[0, :130] = torch.linspace(-1, 1, 130)
    estimates[1, :130] = 0.5
    estimates[:, 7:60] = torch.tensor([[0.25], [-0.25]])
    estimates[:, 192:197] = 1.0
    present = torch.tensor([[True, False], [False, False]])
    out = torch.full((bucket.n_blocks, 1, BLOCK_WORDS), -1, dtype=torch.int64)
    packed = estimates.view(torch.int64).view(2, bucket.n_blocks, FLOAT_PLANES, BLOCK_WORDS)

    count_estimates(KERNELS, BlockVotes(packed, present, bucket, 0), COINS.tie, out=out)

    bits = unpack(split_planes(out)[0], 512 * bucket.n_blocks).numpy()
    total = estimates[:, :130].sum(0).numpy()
    coin = oracle.signs_by_coin(4, 7, oracle.TIE_DOMAIN, 0, 130)
    assert not total[7:60].any()
    assert 0 < (coin[7:60] > 0).sum() < 53
    expected = np.where(total == 0, coin, np.sign(total)) > 0
    assert np.array_equal(bits[:130], expected)
    # Nobody votes for the second parameter; and spare bits are 0.
    assert not bits[130:].any()

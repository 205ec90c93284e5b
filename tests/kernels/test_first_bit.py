"""Where a slot starts among the coins: each element has the bits of its number, to the equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from backends import TRUTH, Backend, over_all
from distlion.kernels import (
    BlockVotes,
    Coefficients,
    Coin,
    Coins,
    ReplyFormat,
    Segment,
    VoteFormat,
)
from distlion.kernels.sums import add_sums, settle_sum, start_sum
from distlion.kernels.words import split_planes, unpack
from distlion.layout import BLOCK_WORDS, BucketLayout, Slot, count_words

COINS = Coins(seed=11, step=5, voter=2)
SIZES = (70, 1, 64, 0, 63, 65, 130)


def make_bucket() -> BucketLayout:
    """Make a slot for each bit of a word; some of their numbers are equal."""
    slots, word = [], 0
    for first_bit in range(64):
        size = SIZES[first_bit % len(SIZES)]
        slots.append(Slot(f"p{first_bit}", size, 3 + first_bit // 2, word, first_bit))
        word += count_words(size)
    return BucketLayout(0, tuple(range(64)), tuple(slots), 1)


BUCKET = make_bucket()


def numbers(slot: Slot) -> range:
    """Count the elements of a slot among all."""
    first = 64 * slot.first_word + slot.first_bit
    return range(first, first + slot.n_elements)


def bits_by_number(coin: Coin, slot: Slot) -> list[int]:
    return [coin.word(number // 64) >> (number % 64) & 1 for number in numbers(slot)]


def bits_of(packed: Tensor, slot: Slot) -> list[int]:
    row = split_planes(packed.cpu())[0, slot.bucket_word : slot.bucket_word + slot.n_words]
    return unpack(row, slot.n_elements).tolist()  # type: ignore[no-any-return]


def make_segments(device: torch.device, *, value: float, dtype: torch.dtype) -> list[Segment]:
    """Make segments whose directions are all ``value``, and whose parameters are all 1."""
    segments = []
    for slot in BUCKET.slots:
        param = torch.ones(slot.n_elements, device=device, dtype=dtype)
        grad = torch.full_like(param, value)
        hyper = Coefficients(0.0, 0.0, LR, 0.0)
        segments.append(Segment(slot, param, grad, torch.zeros_like(param), hyper))
    return segments


def empty_planes(planes: int, device: torch.device) -> Tensor:
    return torch.full((BUCKET.n_blocks, planes, BLOCK_WORDS), -1, device=device)


LR = 2.0**-10
"""A step from 1 by it lies a quarter of the way to the next lower bfloat16."""


@over_all
@pytest.mark.parametrize("planes", [0, 1, 3])
def test_directions_of_zero_take_the_bits_of_their_numbers(planes: int, backend: Backend) -> None:
    segments = make_segments(backend.device, value=0.0, dtype=torch.float32)
    out = empty_planes(planes or 1, backend.device)
    if planes:
        backend.kernels.encode_levels(segments, COINS.zero, norm="l1", step=0.5, out=out)
    else:
        backend.kernels.encode_signs(segments, COINS.zero, out=out)
    for slot in BUCKET.slots:
        assert bits_of(out, slot) == bits_by_number(COINS.zero, slot), slot


@over_all
@pytest.mark.parametrize("planes", [0, 1, 3])
def test_ties_take_the_bits_of_their_numbers(planes: int, backend: Backend) -> None:
    votes = torch.zeros((2, BUCKET.n_blocks, planes or 1, BLOCK_WORDS), dtype=torch.int64)
    votes[1, :, 0] = -1  # against the other one
    votes = votes.to(backend.device)
    present = torch.ones((2, 64), dtype=torch.bool)
    out = empty_planes(1, backend.device)
    # Counted from the middle on, so that some slots are cut.
    for blocks in (slice(0, 4), slice(4, BUCKET.n_blocks)):
        shard = BlockVotes(votes[:, blocks], present, BUCKET, blocks.start)
        if planes:
            backend.kernels.count_levels(shard, COINS.tie, out=out[blocks])
        else:
            backend.kernels.count_signs(shard, COINS.tie, out=out[blocks])
    for slot in BUCKET.slots:
        assert bits_of(out, slot) == bits_by_number(COINS.tie, slot), slot


def test_ties_of_votes_counted_in_parts_take_the_bits_of_their_numbers() -> None:
    votes = torch.zeros((2, BUCKET.n_blocks, 1, BLOCK_WORDS), dtype=torch.int64)
    votes[1] = -1
    present = torch.ones((1, 64), dtype=torch.bool)
    one, other = (
        start_sum(BlockVotes(vote[None], present, BUCKET, 0), vote_format=VoteFormat.LEVEL)
        for vote in votes
    )
    out = empty_planes(1, TRUTH.device)
    settle_sum(
        add_sums(one, other, 2),
        torch.full((64,), 2),
        BUCKET,
        COINS.tie,
        vote_planes=1,
        vote_format=VoteFormat.LEVEL,
        reply_format=ReplyFormat.SIGN,
        out=out,
    )
    for slot in BUCKET.slots:
        assert bits_of(out, slot) == bits_by_number(COINS.tie, slot), slot


@over_all
@pytest.mark.parametrize("op", ["commit", "step_alone"])
def test_rounding_takes_the_bits_of_the_numbers(op: str, backend: Backend) -> None:
    segments = make_segments(backend.device, value=1.0, dtype=torch.bfloat16)
    reply = empty_planes(1, backend.device)
    if op == "step_alone":
        backend.kernels.step_alone(segments, rounding=COINS.rounding)
    else:
        present = [1] * 64
        backend.kernels.commit(
            segments, present, reply, reply_format=ReplyFormat.SIGN, rounding=COINS.rounding
        )
    (exact,) = np.array([1.0 - LR], dtype=np.float32).view(np.uint32).tolist()
    for segment in segments:
        expected = [
            exact + (COINS.rounding.word(number // 4) >> 16 * (number % 4) & 0xFFFF) >> 16
            for number in numbers(segment.slot)
        ]
        assert segment.param.cpu().view(torch.int16).tolist() == expected, segment.slot

"""Votes counted in parts give the reply that counting them at once gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import matrix
from distlion.errors import InvalidArgumentError
from distlion.kernels import BlockVotes, Coins, VoteFormat, choose_kernels
from distlion.kernels.words import interleave, pack
from distlion.layout import BLOCK_WORDS, HEADER_BYTES, BucketLayout, fill_buckets, place_parameters
from distlion.votes import Aggregation, MajorityVote, Roster
from distlion.votes.bucket_vote import BucketCount
from distlion.votes.full_precision import FullPrecision

KERNELS = choose_kernels(torch.device("cpu"))
COINS = Coins(seed=3, step=5, voter=0)
INTEGER_RULES = {
    name: rule for name, rule in matrix.LISTED.items() if rule.vote_format.has_partial_sums
}


def draw_votes(
    bucket: BucketLayout, n_workers: int, planes: int, generator: torch.Generator
) -> Tensor:
    """Random votes, spare bits 0: (workers, blocks, planes, 8) int64."""
    votes = torch.zeros(n_workers, bucket.n_blocks, planes, BLOCK_WORDS, dtype=torch.int64)
    for vote in votes:
        rows = torch.zeros(planes, bucket.n_blocks * BLOCK_WORDS, dtype=torch.int64)
        for slot in bucket.slots:
            for row in rows:
                bits = torch.randint(2, (slot.n_elements,), generator=generator)
                row[slot.bucket_word : slot.bucket_word + slot.n_words] = pack(bits)
        interleave(rows, vote)
    return votes


def add_all(
    counted: BucketCount, sums: list[tuple[Tensor, int]], generator: torch.Generator
) -> Tensor:
    """Add sums of some votes each, two at a time, in an order that is drawn."""
    while len(sums) > 1:
        places = torch.randperm(len(sums), generator=generator)[:2].tolist()
        (first, n), (second, m) = (sums[place] for place in places)
        sums = [each for place, each in enumerate(sums) if place not in places]
        sums.append((counted.add_sums(first, second, n + m), n + m))
    return sums[0][0]


@pytest.mark.parametrize("rule", INTEGER_RULES.values(), ids=INTEGER_RULES)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    n_workers=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15)
def test_sums_added_in_any_order_give_the_reply_to_all(
    rule: Aggregation, sizes: list[int], n_workers: int, seed: int
) -> None:
    roster = Roster.of(n_workers)
    slots = place_parameters([str(number) for number in range(len(sizes))], sizes)
    kinds = [0] * len(sizes)
    (bucket,) = fill_buckets(slots, kinds, n_shards=n_workers, bucket_elements=10**6)
    generator = torch.Generator().manual_seed(seed)
    votes = draw_votes(bucket, n_workers, rule.vote_planes, generator)
    if rule.vote_format is VoteFormat.TERNARY:  # a zero has no sign
        votes[:, :, 0] &= votes[:, :, 1]
    present = torch.rand(n_workers, len(sizes), generator=generator) < 0.8
    shape = rule.shape(bucket, n_workers)
    planes = rule.reply_planes(n_workers)
    expected = torch.empty(bucket.n_blocks, planes, BLOCK_WORDS, dtype=torch.int64)
    rule.count(KERNELS, BlockVotes(votes, present, bucket, 0), COINS, out=expected)

    counted = BucketCount(rule.start(bucket, roster), KERNELS, COINS)
    sums = [
        (counted.start_sum(vote.flatten().view(torch.uint8), here), 1)
        for vote, here in zip(votes, present, strict=True)
    ]
    total = add_all(counted, sums, generator)
    assert len(total) == shape.sum_chunk(n_workers).payload_bytes - HEADER_BYTES * n_workers
    reply = counted.settle_sum(total, present.sum(0))
    assert torch.equal(reply, expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_have_no_sum(dtype: torch.dtype) -> None:
    assert FullPrecision(dtype).shape_of(1000, 3).plane_bytes is None


def test_weighted_votes_of_some_workers_alone_are_refused() -> None:
    (slot,) = place_parameters(["p"], [130])
    (bucket,) = fill_buckets([slot], [0], n_shards=3, bucket_elements=10**6)
    roster = Roster((0, 1, 2), (0, 1, 2), (2, 1, 1))
    votes = draw_votes(bucket, 3, 1, torch.Generator().manual_seed(1)).flatten(1).view(torch.uint8)
    present = torch.ones(3, 1, dtype=torch.bool)
    counted = BucketCount(MajorityVote().start(bucket, roster), KERNELS, COINS)
    assert counted.count_present(present).tolist() == [4]
    with pytest.raises(InvalidArgumentError, match="must count weighted votes all at once"):
        counted.reduce(votes[1:], present[1:], 0)
    with pytest.raises(InvalidArgumentError, match="must count weighted votes all at once"):
        counted.count_present(present[1:])

"""Votes counted in parts give the reply that counting them at once gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import matrix
from distlion.errors import InvalidArgumentError
from distlion.kernels import BlockVotes, Coins, choose_kernels
from distlion.kernels.words import interleave, pack
from distlion.layout import BLOCK_WORDS, BucketLayout, fill_buckets, place_parameters
from distlion.votes import Aggregation, MajorityVote, Roster
from distlion.votes.bucket_vote import BucketCount
from distlion.votes.full_precision import FullPrecision
from distlion.votes.tally import RuleTally

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


@pytest.mark.parametrize("rule", INTEGER_RULES.values(), ids=INTEGER_RULES)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    n_workers=st.integers(1, 6),
    parts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    weights=st.one_of(st.just([1] * 6), st.lists(st.integers(1, 9), min_size=6, max_size=6)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15)
def test_any_split_of_the_workers_gives_the_reply_to_all(
    rule: Aggregation,
    sizes: list[int],
    n_workers: int,
    parts: list[int],
    weights: list[int],
    seed: int,
) -> None:
    roster = Roster(range(n_workers), range(n_workers), weights[:n_workers])  # type: ignore[arg-type]
    slots = place_parameters([str(number) for number in range(len(sizes))], sizes)
    kinds = [0] * len(sizes)
    (bucket,) = fill_buckets(slots, kinds, n_shards=n_workers, bucket_elements=10**6)
    generator = torch.Generator().manual_seed(seed)
    votes = draw_votes(bucket, n_workers, rule.vote_planes, generator)
    present = torch.rand(n_workers, len(sizes), generator=generator) < 0.8
    times = roster.weigh(present)
    shape = rule.shape(bucket, roster.n_votes)
    tally = RuleTally(rule, bucket, COINS, roster.n_votes, roster)

    for shard in range(n_workers):
        block = shard * bucket.shard_blocks
        own = votes[:, block : block + bucket.shard_blocks].contiguous()
        planes = rule.reply_planes(roster.n_votes)
        expected = torch.empty(bucket.shard_blocks, planes, BLOCK_WORDS, dtype=torch.int64)
        rule.count(KERNELS, BlockVotes(own, times, bucket, block), COINS, out=expected)

        sent = own.flatten(1).view(torch.uint8)
        tallies = []
        for part in range(3):
            members = [worker for worker in range(n_workers) if parts[worker] == part]
            if members:
                tallies.append(tally.tally(sent[members], present[members], shard, members))
        assert {len(each) for each in tallies} == {shape.tally_bytes}
        total = tally.combine(torch.stack(tallies))
        reply = tally.settle(total, times.sum(0), shard)
        assert torch.equal(reply, expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_have_no_tally(dtype: torch.dtype) -> None:
    assert FullPrecision(dtype).shape_of(1000, 3).tally_bytes is None


def test_weighted_votes_of_nobody_knows_whom_are_refused() -> None:
    (slot,) = place_parameters(["p"], [130])
    (bucket,) = fill_buckets([slot], [0], n_shards=3, bucket_elements=10**6)
    roster = Roster((0, 1, 2), (0, 1, 2), (2, 1, 1))
    votes = draw_votes(bucket, 3, 1, torch.Generator().manual_seed(1)).flatten(1).view(torch.uint8)
    present = torch.ones(3, 1, dtype=torch.bool)
    counted = BucketCount(MajorityVote().start(bucket, roster), KERNELS, COINS)
    assert counted.count_present(present).tolist() == [4]
    assert counted.count_present(present[1:], [1, 2]).tolist() == [2]
    assert counted.parts is not None
    every = counted.parts.tally(votes, present, 0)
    parts = [counted.parts.tally(votes[row], present[row], 0, row) for row in ([0, 2], [1])]
    assert torch.equal(counted.parts.combine(torch.stack(parts)), every)
    with pytest.raises(InvalidArgumentError, match="must say whose they are"):
        counted.parts.tally(votes[1:], present[1:], 0)
    with pytest.raises(InvalidArgumentError, match="must say whose they are"):
        counted.count_present(present[1:])

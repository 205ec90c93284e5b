"""Votes counted in parts give the reply that counting them at once gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import matrix
from distlion.aggregation import Aggregation, FullPrecision
from distlion.kernels import BlockVotes, Coins, choose_kernels
from distlion.kernels.words import interleave, pack
from distlion.layout import BLOCK_WORDS, Bucket, fill_buckets, place_parameters
from distlion.vote import RuleTally

KERNELS = choose_kernels(torch.device("cpu"))
COINS = Coins(seed=3, step=5, voter=0)
INTEGER_RULES = {
    name: rule for name, rule in matrix.LISTED.items() if rule.vote_format.has_partial_sums
}


def draw_votes(bucket: Bucket, n_workers: int, planes: int, generator: torch.Generator) -> Tensor:
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
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15, deadline=None)
def test_any_split_of_the_workers_gives_the_reply_to_all(
    rule: Aggregation, sizes: list[int], n_workers: int, parts: list[int], seed: int
) -> None:
    slots = place_parameters([str(number) for number in range(len(sizes))], sizes)
    kinds = [0] * len(sizes)
    (bucket,) = fill_buckets(slots, kinds, n_shards=n_workers, bucket_elements=10**6)
    generator = torch.Generator().manual_seed(seed)
    votes = draw_votes(bucket, n_workers, rule.vote_planes, generator)
    present = torch.rand(n_workers, len(sizes), generator=generator) < 0.8
    shape = rule.shape(bucket, n_workers)
    tally = RuleTally(rule, bucket, COINS, n_workers)

    for shard in range(n_workers):
        block = shard * bucket.shard_blocks
        own = votes[:, block : block + bucket.shard_blocks].contiguous()
        planes = rule.reply_planes(n_workers)
        expected = torch.empty(bucket.shard_blocks, planes, BLOCK_WORDS, dtype=torch.int64)
        rule.count(KERNELS, BlockVotes(own, present, bucket, block), COINS, out=expected)

        sent = own.flatten(1).view(torch.uint8)
        tallies = []
        for part in range(3):
            members = [worker for worker in range(n_workers) if parts[worker] == part]
            if members:
                tallies.append(tally.tally(sent[members], present[members], shard))
        assert {len(each) for each in tallies} == {shape.tally_bytes}
        total = tally.combine(torch.stack(tallies))
        reply = tally.settle(total, present.sum(0), shard)
        assert torch.equal(reply, expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_have_no_tally(dtype: torch.dtype) -> None:
    assert FullPrecision(dtype).shape_of(1000, 3).tally_bytes is None

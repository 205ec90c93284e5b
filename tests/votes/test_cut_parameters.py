"""A parameter cut in two, each piece with its place among the coins, moves as the whole does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import matrix
from backends import Backend, over_all
from distlion.kernels import BlockVotes, Coefficients, Coins, Segment
from distlion.layout import BLOCK_WORDS, BucketLayout, Slot, count_words
from distlion.votes import Aggregation, QuantizedVote
from tiers import in_tiers

N_WORKERS = 5
N_ELEMENTS = 200
FIRST = 64 * 12_345 + 41  # among the coins, of the parameter that is cut
CUTS = (0, 1, 22, 23, 24, 37, 64, 87, 130, 199, 200)
HYPER = Coefficients(0.9, 0.99, 2.0**-9, 0.1)
# Means over blocks of 4,096 elements, or over a parameter, are others in a piece. A maximum is not,
# since all directions that are not 0 are of one size here.
RULES = {
    name: rule
    for name, rule in matrix.RULES.items()
    if (not isinstance(rule, QuantizedVote) or rule.bits == 1 or rule.norm == "linf")
    and not rule.worker_state
}
Row = tuple[Tensor, Tensor, Tensor]


def draw(dtype: torch.dtype) -> list[Row]:
    """Draw parameter, gradient and momentum of each worker, with zeros and ties."""
    generator = torch.Generator().manual_seed(17)
    param = torch.randn(N_ELEMENTS, generator=generator).to(dtype)
    rows = []
    for _ in range(N_WORKERS):
        grad = torch.randint(-1, 2, (N_ELEMENTS,), generator=generator).to(dtype)
        rows.append((param, grad, torch.zeros(N_ELEMENTS, dtype=dtype)))
    return rows


def place(pieces: Sequence[tuple[int, int]]) -> BucketLayout:
    """Place the pieces in a bucket, with a word between that nobody has."""
    slots, bucket_word = [], 1
    for start, stop in pieces:
        word, bit = divmod(FIRST + start, 64)
        slots.append(Slot(f"from {start}", stop - start, word, bucket_word, bit))
        bucket_word += count_words(stop - start) + 1
    return BucketLayout(0, tuple(range(len(slots))), tuple(slots), n_shards=2)


def vote(
    backend: Backend, rule: Aggregation, rows: Sequence[Row], pieces: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Step once, the last worker abstaining; return the first one's parameter and momentum."""
    bucket, device, k = place(pieces), backend.device, backend.kernels
    present = torch.ones(N_WORKERS, len(pieces), dtype=torch.bool)
    present[-1] = False
    shape = (bucket.n_blocks, rule.vote_planes, BLOCK_WORDS)
    votes = torch.full((N_WORKERS, *shape), -1, device=device)
    segments: list[list[Segment]] = []
    for rank, row in enumerate(rows):
        segments.append([])
        for slot, (start, stop) in zip(bucket.slots, pieces, strict=True):
            param, grad, exp_avg = (tensor[start:stop].clone().to(device) for tensor in row)
            given = grad if present[rank, 0] else None
            segments[-1].append(Segment(slot, param, given, exp_avg, HYPER))
        flags = rule.encode(k, segments[-1], Coins(3, 7, rank), out=votes[rank])
        assert flags.all()
    coins = Coins(3, 7, 0)
    reply = torch.full((bucket.n_blocks, rule.reply_planes(N_WORKERS), BLOCK_WORDS), -1)
    reply = reply.to(device)
    for first in range(0, bucket.n_blocks, bucket.shard_blocks):
        blocks = slice(first, first + bucket.shard_blocks)
        rule.count(
            k, BlockVotes(votes[:, blocks], present, bucket, first), coins, out=reply[blocks]
        )
    k.commit(
        segments[0],
        present.sum(0).tolist(),
        reply,
        reply_format=rule.reply_format,
        rounding=coins.rounding,
    )
    return (
        torch.cat([segment.param for segment in segments[0]]),
        torch.cat([segment.exp_avg for segment in segments[0]]),
    )


@over_all
@pytest.mark.parametrize(
    "rule",
    in_tiers(RULES.values(), lambda rule: type(rule) is not QuantizedVote or rule.bits in (1, 3)),
    ids=RULES,
)
def test_two_pieces_move_as_the_whole(rule: Aggregation, backend: Backend) -> None:
    rows = draw(torch.bfloat16)
    param, exp_avg = vote(backend, rule, rows, [(0, N_ELEMENTS)])
    assert not torch.equal(param.cpu(), rows[0][0])
    for cut in CUTS:
        moved = vote(backend, rule, rows, [(0, cut), (cut, N_ELEMENTS)])
        assert torch.equal(moved[0], param), cut
        assert torch.equal(moved[1], exp_avg), cut

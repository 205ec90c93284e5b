"""The exam of a rule: what holds for every one, checked against the oracle and against the layout.

    for check in rule_exam.CHECKS:
        check(MajorityVote())

A rule of a new class first needs a line in ``matrix.ORACLES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import matrix
import oracle
from distlion.kernels import (
    BlockVotes,
    Coefficients,
    Coins,
    ReplyFormat,
    Segment,
    VoteFormat,
    choose_kernels,
)
from distlion.kernels.contract import FLOAT_PLANES
from distlion.layout import BLOCK_WORDS, BucketLayout, fill_buckets, place_parameters
from distlion.votes import RULES, Aggregation, Roster
from distlion.votes.bucket_vote import BucketCount, make_worker_state
from distlion.votes.registry import parse_rule

WORLD_SIZES = (1, 2, 3, 8)
# 4,133 is a prime above 4,096: the second, shorter block of a scale.
SIZES = (1, 7, 8, 9, 63, 64, 65, 1023, 1024, 4133)
BETAS = (0.9, 0.99)
SEED = 6
# Coins of zeros and ties are inverted at odd steps.
STEPS = (4, 5)
KERNELS = choose_kernels(torch.device("cpu"))

Bits = NDArray[np.uint8]


@dataclass(frozen=True)
class CountedVote:
    """Directions of all workers on one bucket, and what becomes of them.

    Attributes:
        bucket: Parameters of ``SIZES``.
        directions: [worker][parameter] (n,) float32.
        present: (workers, parameters) bool: who votes.
        votes: (workers, blocks, planes, 8) int64: what is counted, see ``encode``.
        reply: (blocks, reply_planes, 8) int64.
    """

    bucket: BucketLayout
    directions: list[list[oracle.F32]]
    present: Tensor
    votes: Tensor
    reply: Tensor


def hold_vote(
    rule: Aggregation, n_workers: int, *, step: int = STEPS[0], absent: bool = True
) -> CountedVote:
    """Encode and count votes on directions of which some are 0 and some cancel."""
    bucket = make_bucket(n_workers)
    present = torch.ones(n_workers, len(SIZES), dtype=torch.bool)
    if absent and n_workers > 1:
        for index in range(len(SIZES)):
            present[index % n_workers, index] = False
        present[:, 2] = False  # nobody
    grads = [
        [make_grad(worker, index, n) for index, n in enumerate(SIZES)]
        for worker in range(n_workers)
    ]
    votes = torch.stack(
        [
            encode(rule, bucket, grads[worker], present[worker].tolist(), worker, step)
            for worker in range(n_workers)
        ]
    )
    reply = count(rule, bucket, votes, present, step)
    directions = [
        [
            oracle.weighted_sum(BETAS[0], make_momentum(worker, index, n), grads[worker][index])
            for index, n in enumerate(SIZES)
        ]
        for worker in range(n_workers)
    ]
    return CountedVote(bucket, directions, present, votes, reply)


def make_bucket(n_workers: int) -> BucketLayout:
    """Lay out the parameters, one of them with global words after those of another bucket."""
    names = [f"p{n}" for n in SIZES]
    slots = place_parameters(["elsewhere", *names], [100, *SIZES])[1:]
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=n_workers, bucket_elements=1 << 30)
    return bucket


def make_grad(worker: int, index: int, n: int) -> oracle.F32:
    """A quarter has neither gradient nor momentum; in the next, workers contradict each other."""
    grad = oracle.gradient(SEED, 0, worker, index, n)
    opposed = slice(n // 4, n // 2)
    pair = oracle.gradient(SEED, 0, 1000 + worker // 2, index, n)
    grad[opposed] = -pair[opposed] if worker % 2 else pair[opposed]
    return grad


def make_momentum(worker: int, index: int, n: int) -> oracle.F32:
    momentum = oracle.gradient(SEED, 1, worker, index, n)
    momentum[: n // 2] = 0.0
    return momentum


def encode(
    rule: Aggregation,
    bucket: BucketLayout,
    grads: Sequence[oracle.F32],
    present: Sequence[bool],
    worker: int,
    step: int,
    *,
    finite: Sequence[bool] | None = None,
) -> Tensor:
    """Return a worker's votes, (blocks, vote_planes, 8), and check what they say of themselves.

    Under error feedback: what a first vote says, (blocks, 32, 8), which is what is counted.
    """
    segments = [
        Segment(
            slot,
            torch.zeros(slot.n_elements),
            torch.from_numpy(grad) if here else None,
            torch.from_numpy(make_momentum(worker, index, slot.n_elements)),
            Coefficients(*BETAS, 1e-3, 0.0),
        )
        for index, (slot, grad, here) in enumerate(zip(bucket.slots, grads, present, strict=True))
    ]
    votes = []
    for old in (0, -1):  # whatever was there is overwritten
        out = torch.full((bucket.n_blocks, rule.vote_planes, BLOCK_WORDS), old, dtype=torch.int64)
        told = rule.encode(KERNELS, segments, Coins(SEED, step, worker), out=out)
        assert torch.as_tensor(told).tolist() == list(finite or [True] * len(segments))
        votes.append(out)
    assert torch.equal(*votes)
    if rule.n_scales:
        return say(rule, bucket, segments, votes[0], Coins(SEED, step, worker))
    return votes[0]


def say(
    rule: Aggregation, bucket: BucketLayout, segments: list[Segment], votes: Tensor, coins: Coins
) -> Tensor:
    """Return what a worker keeps after a first vote that is committed, packed: float32 values."""
    vote = rule.start(bucket, Roster.of(bucket.n_shards))
    kept = [make_worker_state(rule, segment.param) for segment in segments]
    row, _ = vote.encode(KERNELS, segments, kept, coins, device=votes.device)
    bits = row[:, : row.shape[1] - vote.shape.scales_bytes].contiguous()
    assert torch.equal(bits.view(-1), votes.view(-1).view(torch.uint8))
    assert not any(kept_of.any() for state in kept for kept_of in state.values())
    vote.note()
    return (
        vote.export_state(kept).view(torch.int64).view(bucket.n_blocks, FLOAT_PLANES, BLOCK_WORDS)
    )


def count(
    rule: Aggregation,
    bucket: BucketLayout,
    votes: Tensor,
    present: Tensor,
    step: int,
    first: int = 0,
) -> Tensor:
    """Return the reply to votes on some blocks, (blocks, reply_planes, 8)."""
    replies = []
    for old in (0, -1):
        shape = (votes.shape[1], rule.reply_planes(votes.shape[0]), BLOCK_WORDS)
        out = torch.full(shape, old, dtype=torch.int64)
        cast = BlockVotes(votes, present, bucket, first)
        rule.count(KERNELS, cast, Coins(SEED, step, 0), out=out)
        replies.append(out)
    assert torch.equal(*replies)
    return replies[0]


def unpack(packed: Tensor) -> Bits:
    """Cut packed planes into bits: (planes, elements of the bucket), spare ones included."""
    planes = packed.transpose(0, 1).contiguous().numpy().view(np.uint8)
    return np.unpackbits(planes.reshape(packed.shape[1], -1), axis=1, bitorder="little")


def read_reply(reply_format: ReplyFormat, bits: Bits, n_present: int) -> oracle.I64:
    """Return S of each element from the planes of a reply."""
    planes = bits.astype(np.int64)
    if reply_format is ReplyFormat.SIGN:
        return 2 * planes[0] - 1
    if reply_format is ReplyFormat.TERNARY:
        return (2 * planes[0] - 1) * planes[1]
    ones = sum(plane << power for power, plane in enumerate(planes))
    return 2 * np.asarray(ones) - n_present


def where(bucket: BucketLayout, index: int) -> slice:
    """Return the place of a parameter among the elements of its bucket."""
    first = 64 * bucket.slots[index].bucket_word
    return slice(first, first + bucket.slots[index].n_elements)


def check_sizes(rule: Aggregation) -> None:
    """Votes have planes, and a reply has those that its format needs."""
    assert rule.vote_planes >= 1
    for n_workers in range(1, 130):
        expected = {
            ReplyFormat.SIGN: 1,
            ReplyFormat.TERNARY: 2,
            ReplyFormat.COUNT: len(bin(n_workers)) - 2,
        }[rule.reply_format]
        assert rule.reply_planes(n_workers) == expected


def check_repr(rule: Aggregation) -> None:
    """A rule's text rebuilds it, in Python and from a checkpoint."""
    names = {cls.__name__: cls for cls in (type(named.rule) for named in RULES.values())}
    assert eval(repr(rule), {**names, "torch": torch}) == rule
    assert parse_rule(repr(rule)) == rule
    assert hash(parse_rule(repr(rule))) == hash(rule)


def check_against_the_oracle(rule: Aggregation) -> None:
    """Encoded and counted, votes give the S of the oracle, of those who are present."""
    for n_workers in WORLD_SIZES:
        for step in STEPS:
            held = hold_vote(rule, n_workers, step=step)
            bits = unpack(held.reply)
            for index in range(len(SIZES)):
                voters = held.present[:, index].nonzero().flatten().tolist()
                if voters:
                    found = read_reply(
                        rule.reply_format, bits[:, where(held.bucket, index)], len(voters)
                    )
                    expected = ask_the_oracle(rule, held, index, voters, step)
                    assert np.array_equal(found, expected), (n_workers, step, index)


def ask_the_oracle(
    rule: Aggregation, held: CountedVote, index: int, voters: Sequence[int], step: int
) -> oracle.I64:
    slot = held.bucket.slots[index]

    def draw(domain: int, *, second: bool = False) -> oracle.I64:
        place = slot.first_word, slot.n_elements
        return oracle.signs_by_coin(SEED, step, domain, *place, second=second)

    return oracle.combine(
        [
            (
                held.directions[worker][index],
                make_grad(worker, index, SIZES[index]),
                draw(oracle.FIRST_ZERO_DOMAIN + worker),
                draw(oracle.FIRST_ZERO_DOMAIN + worker, second=True),
            )
            for worker in voters
        ],
        matrix.describe_for_oracle(rule),
        draw(oracle.TIE_DOMAIN),
    )


def check_spare_bits(rule: Aggregation) -> None:
    """Bits between and after parameters, and those of a parameter without a vote, are 0."""
    held = hold_vote(rule, 3)
    used = np.zeros(held.bucket.n_blocks * 512, dtype=bool)
    for index in range(len(SIZES)):
        used[where(held.bucket, index)] = True
    assert not unpack(held.reply)[:, ~used].any()
    for worker in range(3):
        voted = np.zeros_like(used)
        for index in held.present[worker].nonzero().flatten().tolist():
            voted[where(held.bucket, index)] = True
        assert not unpack_votes(rule, held.votes[worker])[:, ~voted].any()


def unpack_votes(rule: Aggregation, votes: Tensor) -> Bits:
    """Cut a worker's votes into bits, (bits of an element, elements), wherever these lie."""
    if rule.vote_format.has_partial_sums or rule.vote_format is VoteFormat.PAIR:
        return unpack(votes)
    # Values, not planes: 512 of them to a block, one after the other.
    values = votes.numpy().view(np.uint8).reshape(-1, votes.shape[1] // 8)
    return np.unpackbits(values, axis=1).T


def check_absent_votes_do_not_count(rule: Aggregation) -> None:
    """What lies in the place of an absent worker's vote changes no bit of the reply."""
    if rule.n_scales:
        pytest.skip("what an absent worker said before still counts: kernels/test_feedback.py")
    held = hold_vote(rule, 3)
    votes = held.votes.clone()
    for worker, index in (~held.present).nonzero().tolist():
        block = held.bucket.slots[index].bucket_word // BLOCK_WORDS
        votes[worker, block] ^= mask_of(rule, held.bucket, index, block)
    assert not torch.equal(votes, held.votes)
    found = count(rule, held.bucket, votes, held.present, STEPS[0])
    for index in range(len(SIZES)):
        if held.present[:, index].any():
            here = where(held.bucket, index)
            assert np.array_equal(unpack(found)[:, here], unpack(held.reply)[:, here])


def mask_of(rule: Aggregation, bucket: BucketLayout, index: int, block: int) -> Tensor:
    """Return a block, (vote_planes, 8), with the bits of one parameter set."""
    own = np.zeros(bucket.n_blocks * 512, dtype=bool)
    own[where(bucket, index)] = True
    own = own[512 * block : 512 * (block + 1)]
    if rule.vote_format is VoteFormat.DIRECTION:
        values = np.repeat(own, rule.vote_planes // 8).astype(np.uint8) * 255
        return torch.from_numpy(values.view(np.int64).reshape(-1, BLOCK_WORDS).copy())
    words = np.packbits(own, bitorder="little").view(np.int64)
    return torch.from_numpy(np.tile(words, (rule.vote_planes, 1)))


def check_shards_count_alike(rule: Aggregation) -> None:
    """Owners that count a shard each write, together, what one that counts everything writes."""
    for n_workers in WORLD_SIZES:
        held = hold_vote(rule, n_workers)
        blocks = held.bucket.shard_blocks
        parts = [
            count(
                rule,
                held.bucket,
                held.votes[:, first : first + blocks].contiguous(),
                held.present,
                STEPS[0],
                first,
            )
            for first in range(0, held.bucket.n_blocks, blocks)
        ]
        assert len(parts) == n_workers
        assert torch.equal(torch.cat(parts), held.reply)


def check_parts_add_up(rule: Aggregation) -> None:
    """Votes that are counted in parts give the reply to all; those of floats cannot be."""
    held = hold_vote(rule, 3)
    if not rule.vote_format.has_partial_sums:
        assert rule.shape(held.bucket, len(held.present)).plane_bytes is None
        return
    vote, coins = rule.start(held.bucket, Roster.of(3)), Coins(SEED, STEPS[0], 0)
    counted = BucketCount(vote, KERNELS, coins)
    first, second, third = (
        counted.start_sum(vote.flatten().view(torch.uint8), present)
        for vote, present in zip(held.votes, held.present, strict=True)
    )
    total = counted.add_sums(first, counted.add_sums(second, third, 2), 3)
    reply = counted.settle_sum(total, held.present.sum(0))
    assert torch.equal(reply, held.reply.flatten().view(torch.uint8))


def check_damage_is_told(rule: Aggregation) -> None:
    """A gradient that is not finite is told, and its parameter, and no other, has no bits."""
    bucket = make_bucket(2)
    good = [make_grad(0, index, n) for index, n in enumerate(SIZES)]
    everybody = [True] * len(SIZES)
    expected = unpack_votes(rule, encode(rule, bucket, good, everybody, 0, STEPS[0]))
    for value in (np.nan, np.inf, -np.inf):
        bad = list(good)
        bad[4] = good[4].copy()
        bad[4][-1] = value
        finite = [index != 4 for index in range(len(SIZES))]
        votes = encode(rule, bucket, bad, everybody, 0, STEPS[0], finite=finite)
        found = unpack_votes(rule, votes)
        for index in range(len(SIZES)):
            here = where(bucket, index)
            wanted = expected[:, here] if index != 4 else np.zeros_like(expected[:, here])
            assert np.array_equal(found[:, here], wanted)


CHECKS: tuple[Callable[[Aggregation], None], ...] = (
    check_sizes,
    check_repr,
    check_against_the_oracle,
    check_spare_bits,
    check_absent_votes_do_not_count,
    check_shards_count_alike,
    check_parts_add_up,
    check_damage_is_told,
)

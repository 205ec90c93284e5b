"""Votes by recursive doubling: bits of ``AllReduce``, few peers, bytes as planned; or a refusal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import distlion
import matrix
from distlion import faults
from distlion.errors import InvalidArgumentError
from distlion.failures import Status
from distlion.kernels import Coins, choose_kernels
from distlion.layout import WORD_ELEMENTS, BucketLayout, Slot, fill_buckets
from distlion.votes import Aggregation, MajorityVote, Roster
from distlion.votes.bucket_vote import BucketCount
from distlion.votes.full_precision import FullPrecision
from distlion.wire import ByteCount, Exchange
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.pattern import Ballot, Reply
from distlion.wire.recursive_doubling import RecursiveDoubling
from loopback import CPU, make_links, run_together
from memory_link import Memory
from pattern_exam import CULPRIT, FIRST_RANK, STEP, Trial
from tiers import in_tiers
from toys import CautiousVote

WORLD_SIZES = range(1, 18)
SIZES = (1, 63, 64, 65, 700, 1500)
KERNELS = choose_kernels(CPU)
RULES: dict[str, Aggregation] = {
    name: rule
    for name, rule in {**matrix.RULES, "toy": CautiousVote()}.items()
    if rule.vote_format.has_partial_sums
}
MANY_ELEMENTS = 1 << 21
FRAMES_AND_PADDING = 0.02
"""Of bytes: 64 of a header for each vote, and up to 511 elements of padding a shard."""


def make_bucket(n: int, *, first_bit: int = 0) -> BucketLayout:
    slots = [Slot(f"p{i}", size, 7 * i, 0, first_bit) for i, size in enumerate(SIZES)]
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=n, bucket_elements=1 << 20)
    return bucket


def make_votes(rule: Aggregation, bucket: BucketLayout, seed: int) -> Tensor:
    """Draw the bits of one vote: elements agree enough for sums of all sizes, spare bits are 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (bucket.n_blocks, rule.vote_planes, 8)
    words = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator) * 2 + 1
    spare = torch.zeros(bucket.n_blocks * 8, dtype=torch.int64)
    for slot in bucket.slots:
        own = slice(slot.bucket_word, slot.bucket_word + slot.n_words)
        spare[own] = -1
        rest = slot.n_elements % WORD_ELEMENTS
        if rest:
            spare[own.stop - 1] = (1 << rest) - 1
    words &= spare.view(-1, 1, 8)
    if rule.vote_format.value == "ternary":  # a zero has no sign
        words[:, 0] &= words[:, 1]
    return words.view(-1).view(torch.uint8).view(bucket.n_shards, -1)


def vote(
    pattern: Exchange, rule: Aggregation, n: int, *, first_bit: int = 0
) -> tuple[list[Reply], list[Memory]]:
    """Let n workers vote, of whom some abstain for some parameters, and all for the fourth."""
    bucket, links = make_bucket(n, first_bit=first_bit), make_links(n)
    counted = rule.start(bucket, Roster.of(n))
    exchanges = []
    for rank, link in enumerate(links):
        present = torch.tensor([i != 3 and (rank + i) % 5 > 0 for i in range(len(SIZES))])
        header = Header(ChunkKind.VOTE, 3, bucket.index, rank, 99)
        ballot = Ballot(header, make_votes(rule, bucket, rank), present)
        count = BucketCount(counted, KERNELS, Coins(seed=1, step=3, voter=rank))
        exchanges.append(pattern.exchange(link, counted.shape, ballot, count))
    return run_together(exchanges)[0], links


def is_sampled(case: tuple[str, int]) -> bool:
    """Return whether a case is quick: two sizes of each rule, and some rules of each size."""
    name, n = case
    return (3 * list(RULES).index(name) + n) % 8 == 0


@pytest.mark.parametrize(("name", "n"), in_tiers(itertools.product(RULES, WORLD_SIZES), is_sampled))
def test_replies_are_bitwise_those_of_all_reduce(name: str, n: int) -> None:
    rule = RULES[name]
    expected, _ = vote(distlion.AllReduce(), rule, n, first_bit=5)
    found, links = vote(RecursiveDoubling(), rule, n, first_bit=5)
    shape = rule.shape(make_bucket(n), n)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.verdict.status is theirs.verdict.status is Status.OK
        assert torch.equal(ours.payload, theirs.payload.view(n, -1))
        assert torch.equal(ours.present > 0, theirs.present > 0)
        if shape.has_counts:
            assert torch.equal(ours.present, theirs.present)
        assert links[rank].counted == RecursiveDoubling().plan(shape, rank)


def test_votes_of_these_tests_have_ties_and_majorities() -> None:
    """Equality above means something only if replies differ from each other, and from coins."""
    replies = {n: vote(RecursiveDoubling(), MajorityVote(tie="zero"), n)[0][0] for n in (4, 16)}
    for n, reply in replies.items():
        planes = reply.payload.view(torch.int64).view(-1, 2, 8)
        ups, moves = planes[:, 0], planes[:, 1]
        assert moves.any() and (ups != moves).any() and ups.any(), n
        n_tied = sum(bin(~word & (1 << 64) - 1).count("1") for word in moves.flatten().tolist())
        assert n_tied > 100


class Listening:
    """A link that notes whom it swaps with."""

    def __init__(self, link: Memory) -> None:
        self._link, self.peers = link, set[int]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def swap(self, *args: Tensor, peer: int, step: int | None) -> object:
        self.peers.add(peer)
        return self._link.swap(*args, peer=peer, step=step)


@pytest.mark.parametrize("n", [2, 3, 8, 11, 16, 17])
def test_a_rank_talks_to_about_log2_of_all_others(n: int) -> None:
    trial = Trial(RecursiveDoubling(), n)
    trial.links = [Listening(link) for link in trial.links]  # type: ignore[misc]
    trial.run()
    most = math.floor(math.log2(n)) + (n & (n - 1) > 0)
    talked: Sequence[set[int]] = [link.peers for link in trial.links]  # type: ignore[attr-defined]
    assert max(map(len, talked)) == most
    assert all(rank in talked[peer] for rank, peers in enumerate(talked) for peer in peers)


# Of 17, rank 0 takes a vote first: it sends 2 + 2 + 3 + 4 bits of sums, and then the reply.
@pytest.mark.parametrize(("n", "bits"), [(2, 1), (3, 3), (4, 3), (8, 6), (16, 10), (17, 12)])
def test_bits_sent_are_those_of_partial_counts(n: int, bits: int) -> None:
    shape = MajorityVote().shape_of(MANY_ELEMENTS, n)
    sent = 8 * RecursiveDoubling().plan(shape, 0).sent_bytes / MANY_ELEMENTS
    assert sent == pytest.approx(bits, rel=FRAMES_AND_PADDING)


def test_floats_are_refused_before_anything_is_sent() -> None:
    trial = Trial(RecursiveDoubling(), 2)
    trial.shape = replace(trial.shape, plane_bytes=None)
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        trial.run()
    assert [link.counted for link in trial.links] == [ByteCount()] * 2


def test_a_reducer_without_sums_is_refused_before_anything_is_sent() -> None:
    trial = Trial(RecursiveDoubling(), 2)
    trial.reducers = [SimpleNamespace(reduce=each.reduce) for each in trial.reducers]
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        trial.run()
    assert [link.counted for link in trial.links] == [ByteCount()] * 2


def test_a_rule_that_cannot_be_counted_in_parts_is_refused_by_name() -> None:
    shape = FullPrecision().shape_of(100, 4)
    assert not RecursiveDoubling().carries(shape)
    with pytest.raises(InvalidArgumentError, match=r"RecursiveDoubling\(\).*FullPrecision\("):
        RecursiveDoubling().check_carries(shape, FullPrecision())


def test_weighted_votes_have_no_packed_sum() -> None:
    roster = replace(Roster.of(2), weights=(1, 2))
    vote = MajorityVote().start(make_bucket(2), roster)
    counted = BucketCount(vote, KERNELS, Coins(seed=1, step=3, voter=0))
    votes = make_votes(MajorityVote(), make_bucket(2), 0)
    with pytest.raises(InvalidArgumentError, match="workers have weights"):
        counted.start_sum(votes.flatten(), torch.ones(len(SIZES), dtype=torch.bool))


def damaged_verdicts(n: int, round_: int) -> list[tuple[Status, tuple[int, ...]]]:
    """Damage what the culprit sends in a round, and return the verdicts."""
    trial, sent = Trial(RecursiveDoubling(), n), 0

    def damage(chunks: object) -> None:
        nonlocal sent
        assert isinstance(chunks, Tensor)
        sent += 1
        if sent == round_:
            chunks[70] ^= 1

    faults.arm(rank=FIRST_RANK + CULPRIT, step=STEP, point="framed", action=damage)
    try:
        replies = trial.run()
    finally:
        faults.disarm_all()
    assert sent >= round_
    return [(reply.verdict.status, reply.verdict.culprits) for reply in replies]


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_damage_to_a_vote_is_known_to_all(n: int) -> None:
    assert set(damaged_verdicts(n, 1)) == {(Status.CORRUPT, (FIRST_RANK + CULPRIT,))}


def test_damage_to_a_later_sum_is_known_to_those_who_are_met_afterwards() -> None:
    """Ranks 1 and 3 swap in the second round of 4: 0 and 2 have swapped the same sums by then."""
    verdicts = damaged_verdicts(4, 2)
    lost = (Status.CORRUPT, (FIRST_RANK + CULPRIT,))
    assert verdicts == [(Status.OK, ()), lost, (Status.OK, ()), lost]


def test_a_group_whose_rule_it_cannot_carry_is_refused_before_anything_changes() -> None:
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    cluster = distlion.VirtualCluster([first], workers=3, exchange=distlion.RecursiveDoubling())

    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        cluster.add_param_group({"params": [second], "aggregation": distlion.FullPrecision()})

    assert len(cluster.param_groups) == 1
    for worker in range(3):
        first.grad = torch.ones(3)
        cluster.collect(worker)
    cluster.step()
    assert cluster.committed_step == 1

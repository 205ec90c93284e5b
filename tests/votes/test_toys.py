"""Three votes that no part of the library was made for, out of what ``distlion.votes`` has.

A vote of some of the workers, one in which some count for more, and one whose bytes travel as
messages between clients and a server.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import matrix
from distlion.kernels import Coefficients, Coins, Segment, choose_kernels
from distlion.layout import BucketLayout, Slot, fill_buckets
from distlion.votes import Aggregation, MajorityVote, Roster
from distlion.votes.bucket_vote import BucketVote, make_worker_state

CPU = torch.device("cpu")
KERNELS = choose_kernels(CPU)
HYPER = Coefficients(beta1=0.9, beta2=0.99, lr=0.1, weight_decay=0.0, grad_scale=1.0)
N_ELEMENTS, SEED, STEPS = 1500, 3, 4


def make_bucket(n_shards: int) -> BucketLayout:
    slots = [Slot("weight", N_ELEMENTS, 0, 0)]
    (bucket,) = fill_buckets(slots, [0], n_shards=n_shards, bucket_elements=N_ELEMENTS)
    return bucket


class Voter:
    """A worker: a replica of the parameter, its momentum, and what its rule keeps."""

    def __init__(self, rule: Aggregation, bucket: BucketLayout, roster: Roster, voter: int) -> None:
        self.vote, self.voter = rule.start(bucket, roster), voter
        self.param, self.momentum = torch.zeros(2, N_ELEMENTS)
        self.kept = make_worker_state(rule, self.param)

    def encode(self, step: int) -> bytes:
        """Return the votes on all shards as one message."""
        generator = torch.Generator().manual_seed(100 * step + self.voter)
        grad = torch.randn(N_ELEMENTS, generator=generator)
        self.segments = [Segment(self.vote.bucket.slots[0], self.param, grad, self.momentum, HYPER)]
        coins = Coins(SEED, step, self.voter)
        votes, finite = self.vote.encode(KERNELS, self.segments, [self.kept], coins, device=CPU)
        assert bool(finite.all())
        return votes.numpy().tobytes()

    def take(self, reply: bytes, n_present: int) -> None:
        self.vote.commit(KERNELS, self.segments, [n_present], as_tensor(reply), None)


def as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def serve(counter: BucketVote, votes: Sequence[bytes], step: int) -> tuple[bytes, int]:
    """Count messages, a row each; return the reply, and how many votes there were."""
    rows, present = torch.stack([as_tensor(vote) for vote in votes]), torch.ones(len(votes), 1)
    reply = counter.count(KERNELS, rows, present.bool(), 0, Coins(SEED, step, 0))
    counter.note()
    return reply.numpy().tobytes(), int(counter.count_present(present.bool().long()))


def train(rule: Aggregation, roster: Roster) -> list[Voter]:
    """Train with votes as messages; each voter has a replica, and the server has none."""
    bucket = make_bucket(roster.n_shards)
    voters = [Voter(rule, bucket, roster, voter) for voter in roster.ids]
    counter = rule.start(bucket, roster)
    for step in range(STEPS):
        reply = serve(counter, [voter.encode(step) for voter in voters], step)
        for voter in voters:
            voter.take(*reply)
    return voters


@pytest.mark.parametrize("rule", matrix.LISTED.values(), ids=matrix.LISTED)
def test_a_vote_of_some_is_the_vote_of_a_smaller_crew(rule: Aggregation) -> None:
    # Four owners count shards, and worker 1 is gone: rows, owners and ids are three things.
    some = Roster(ids=(0, 2, 3), owners=(0, 2, 3, 0), weights=(1, 1, 1), epoch=1)
    one_owner = Roster(ids=(0, 2, 3), owners=(3,), weights=(1, 1, 1), epoch=1)
    for voter, other in zip(train(rule, some), train(rule, one_owner), strict=True):
        assert torch.equal(voter.param, other.param) and bool(voter.param.any())
        assert torch.equal(voter.momentum, other.momentum)


@pytest.mark.parametrize("rule", matrix.LISTED.values(), ids=matrix.LISTED)
def test_a_weight_of_three_is_three_voters_who_agree(rule: Aggregation) -> None:
    weighted = Roster(ids=(0, 1, 2), owners=(0,), weights=(1, 3, 1))
    bucket, coins = make_bucket(1), Coins(SEED, 0, 0)
    voters = [Voter(rule, bucket, weighted, voter) for voter in weighted.ids]
    votes = [voter.encode(0) for voter in voters]
    reply, n_votes = serve(rule.start(bucket, weighted), votes, 0)
    plain = rule.start(bucket, Roster.of(5))
    rows = torch.stack([as_tensor(votes[voter]) for voter in (0, 1, 1, 1, 2)])
    present = torch.ones(5, 1, dtype=torch.bool)
    assert as_tensor(reply).equal(plain.count(KERNELS, rows, present, 0, coins))
    assert n_votes == 5


def test_who_has_most_votes_decides() -> None:
    heavy = train(MajorityVote(), Roster(ids=(0, 1, 2), owners=(1,), weights=(1, 3, 1)))
    (alone,) = train(MajorityVote(), Roster(ids=(1,), owners=(1,), weights=(1,)))
    assert torch.equal(heavy[0].param, alone.param)


@pytest.mark.parametrize("rule", matrix.LISTED.values(), ids=matrix.LISTED)
def test_messages_to_a_server_keep_replicas_equal(rule: Aggregation) -> None:
    first, *others = train(rule, Roster(ids=(4, 8, 6), owners=(4,), weights=(1, 1, 1)))
    assert bool(first.param.any())
    for other in others:
        assert torch.equal(first.param, other.param)
        assert not torch.equal(first.momentum, other.momentum)

"""The exam of what a rule keeps: drafted beside what is there, and told to whoever counts anew.

    state_exam.check_what_is_kept(MajorityVote())

A rule without state passes it too: a step is then a function of what it is given.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from distlion.kernels import Coefficients, Coins, Segment
from distlion.layout import BucketLayout
from distlion.votes import Aggregation, Roster
from distlion.votes.bucket_vote import BucketVote, WorkerState, make_worker_state
from rule_exam import BETAS, KERNELS, SEED, make_bucket, make_grad, make_momentum

N_WORKERS, STEPS = 3, 3
CPU = torch.device("cpu")
NO_GRADIENT, NOT_FINITE = 4, 5
"""Parameters for which worker 1 abstains."""


class _Run:
    """Workers, who counts whole buckets, and owners who count a shard each."""

    def __init__(self, rule: Aggregation, bucket: BucketLayout) -> None:
        self.rule, self.bucket, self.step = rule, bucket, 0
        self.roster = Roster.of(N_WORKERS)
        self.workers = [self.start() for _ in range(N_WORKERS)]
        self.counter, self.owners = self.start(), [self.start() for _ in range(N_WORKERS)]
        self.kept: list[list[WorkerState]] = [
            [make_worker_state(rule, torch.zeros(slot.n_elements)) for slot in bucket.slots]
            for _ in range(N_WORKERS)
        ]

    def start(self) -> BucketVote:
        return self.rule.start(self.bucket, self.roster)

    def list_segments(self, worker: int) -> list[Segment]:
        segments = []
        for index, slot in enumerate(self.bucket.slots):
            # Steps differ, so that what is kept is neither 0 nor what it was.
            grad = torch.from_numpy(make_grad(worker, index, slot.n_elements)) * (1 + self.step)
            if worker == 1 and index == NOT_FINITE:
                grad[0] = torch.inf
            here = not (worker == 1 and index == NO_GRADIENT)
            segments.append(
                Segment(
                    slot,
                    torch.zeros(slot.n_elements),
                    grad if here else None,
                    torch.from_numpy(make_momentum(worker, index, slot.n_elements)),
                    Coefficients(*BETAS, 1e-3, 0.0),
                )
            )
        return segments

    def encode(self, worker: int, kept: list[WorkerState]) -> Tensor:
        coins = Coins(SEED, self.step, worker)
        votes, finite = self.workers[worker].encode(
            KERNELS, self.list_segments(worker), kept, coins, device=CPU
        )
        expected = [not (worker == 1 and index == NOT_FINITE) for index in range(len(finite))]
        assert finite.tolist() == expected
        return votes

    def count(self, counter: BucketVote, votes: Tensor, first_shard: int) -> Tensor:
        present = torch.ones(N_WORKERS, len(self.bucket.slots), dtype=torch.bool)
        present[1, [NO_GRADIENT, NOT_FINITE]] = False
        rows = votes.reshape(N_WORKERS, -1)
        return counter.count(KERNELS, rows, present, first_shard, Coins(SEED, self.step, 0))

    def vote(self) -> None:
        """Do a step; the one before it failed, after all had encoded and counted."""
        before = copy.deepcopy(self.kept)
        for attempt in range(2):
            votes = torch.stack([self.encode(n, self.kept[n]) for n in range(N_WORKERS)])
            reply = self.count(self.counter, votes, 0)
            parts = [self.count(owner, votes[:, n], n) for n, owner in enumerate(self.owners)]
            if attempt == 0:
                first = votes, reply
        assert torch.equal(first[0], votes)
        assert torch.equal(first[1], reply)
        assert torch.equal(torch.cat(parts), reply)
        assert _are_equal(before, self.kept)
        for vote in (*self.workers, self.counter, *self.owners):
            vote.note()
        for index in (NO_GRADIENT, NOT_FINITE):  # who abstains has said nothing
            assert _are_equal([[before[1][index]]], [[self.kept[1][index]]])
        self.step += 1


def _are_equal(one: list[list[WorkerState]], other: list[list[WorkerState]]) -> bool:
    flat = [[state for row in states for state in row] for states in (one, other)]
    pairs = zip(*flat, strict=True)
    return all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)


def check_what_is_kept(rule: Aggregation) -> None:
    """Check steps that fail, shards, workers who abstain, and a counter that comes later."""
    run = _Run(rule, make_bucket(N_WORKERS))
    for _ in range(STEPS):
        run.vote()

    votes = torch.stack([run.encode(n, run.kept[n]) for n in range(N_WORKERS)])
    later = run.start()
    told = torch.stack(
        [run.workers[n].export_state(run.kept[n]).view(-1) for n in range(N_WORKERS)]
    )
    later.import_states(told)
    assert torch.equal(run.count(later, votes, 0), run.count(run.counter, votes, 0))

    nothing = [make_worker_state(rule, segment.param) for segment in run.list_segments(0)]
    has_effect = not torch.equal(run.encode(0, nothing), votes[0])
    assert has_effect == bool(rule.worker_state)

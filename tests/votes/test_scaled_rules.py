"""Rules whose replies say how far, against the oracle: bits, scales, state, shards."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import distlion
import matrix
import oracle
import state_exam
from delta_oracle import DeltaOracle
from distlion.errors import InvalidArgumentError
from distlion.kernels import Coefficients, Coins, Kernels, Segment, choose_kernels
from distlion.layout import BucketLayout, fill_buckets, pad_bytes, place_parameters
from distlion.votes import Aggregation, Roster
from distlion.votes.bucket_vote import make_worker_state
from distlion.votes.registry import parse_rule
from tiers import in_tiers

SIZES = (4133, 1, 65, 512, 1023)
SEED, LR, N_VOTES = 6, 0.7, 4
KERNELS: dict[str, Kernels] = {
    "core": choose_kernels(torch.device("cpu")),
    "reference": Kernels(),
}
RULES = pytest.mark.parametrize("rule", matrix.DELTA_RULES.values(), ids=matrix.DELTA_RULES)


def make_bucket(n_shards: int) -> BucketLayout:
    slots = place_parameters([f"p{size}" for size in SIZES], SIZES)
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=n_shards, bucket_elements=1 << 30)
    return bucket


def draw_deltas(worker: int, step: int) -> list[oracle.F32 | None]:
    """Some are 0, pairs of workers contradict each other, worker 1 abstains here and there."""
    deltas: list[oracle.F32 | None] = []
    for index, size in enumerate(SIZES):
        delta = oracle.gradient(SEED, step, worker, index, size) * np.float32(1e-2)
        pair = oracle.gradient(SEED, step, 1000 + worker // 2, index, size)
        opposed = slice(size // 4, size // 2)
        delta[opposed] = -pair[opposed] if worker % 2 else pair[opposed]
        delta[: size // 8] = 0.0
        deltas.append(None if worker == 1 and index == (step + 2) % len(SIZES) else delta)
    return deltas


class Run:
    """Workers, a counter of everything, and owners who count a shard each."""

    def __init__(self, rule: Aggregation, n_workers: int, kernels: Kernels) -> None:
        self.bucket, self.kernels, self.step = make_bucket(n_workers), kernels, 0
        roster = Roster.of(n_workers)
        self.workers = [rule.start(self.bucket, roster) for _ in range(n_workers)]
        self.counter = rule.start(self.bucket, roster)
        self.owners = [rule.start(self.bucket, roster) for _ in range(n_workers)]
        self.params = [
            torch.from_numpy(oracle.gradient(1, 0, 0, n, s)) for n, s in enumerate(SIZES)
        ]
        self.momenta = [[torch.zeros(size) for size in SIZES] for _ in range(n_workers)]
        self.kept = [
            [make_worker_state(rule, param) for param in self.params] for _ in range(n_workers)
        ]

    def segments(self, worker: int, deltas: list[oracle.F32 | None]) -> list[Segment]:
        return [
            Segment(
                slot,
                self.params[index],
                None if deltas[index] is None else torch.from_numpy(deltas[index]),
                self.momenta[worker][index],
                Coefficients(0.0, 0.0, LR, 0.0),
            )
            for index, slot in enumerate(self.bucket.slots)
        ]

    def vote(self, deltas: list[list[oracle.F32 | None]]) -> None:
        segments = [self.segments(worker, mine) for worker, mine in enumerate(deltas)]
        rows = torch.stack([self.encode(worker, mine) for worker, mine in enumerate(segments)])
        present = torch.tensor([[delta is not None for delta in mine] for mine in deltas])
        coins = Coins(SEED, self.step, 0)
        flat = rows.view(len(rows), -1)
        reply = self.counter.count(self.kernels, flat, present, 0, coins)
        parts = [
            owner.count(self.kernels, rows[:, shard], present, shard, coins)
            for shard, owner in enumerate(self.owners)
        ]
        assert torch.equal(torch.cat(parts), reply)
        assert reply.numel() == self.counter.shape.n_shards * self.counter.shape.reply_bytes
        counts = present.sum(0).tolist()
        self.counter.commit(self.kernels, segments[0], counts, reply, None)
        for vote in (*self.workers, *self.owners):
            vote.note()
        self.step += 1

    def encode(self, worker: int, segments: list[Segment]) -> Tensor:
        kept = self.kept[worker] if self.workers[worker].rule.worker_state else ()
        coins = Coins(SEED, self.step, worker)
        votes, finite = self.workers[worker].encode(
            self.kernels, segments, kept, coins, device=torch.device("cpu")
        )
        assert finite.all()
        return votes


@pytest.mark.parametrize(
    ("kernels", "n_workers"),
    in_tiers(
        itertools.product(KERNELS, [1, 2, 3, 8]),
        lambda case: case in (("core", 3), ("reference", 1)),
    ),
)
@RULES
def test_votes_move_the_common_point_as_the_oracle_does(
    rule: Aggregation, n_workers: int, kernels: str
) -> None:
    run = Run(rule, n_workers, KERNELS[kernels])
    expected = DeltaOracle(
        [param.numpy().copy() for param in run.params],
        matrix.describe_delta_rule(rule),
        n_workers,
        LR,
        seed=SEED,
    )
    for step in range(N_VOTES):
        deltas = [draw_deltas(worker, step) for worker in range(n_workers)]
        run.vote(deltas)
        expected.vote(deltas)
        for index, param in enumerate(run.params):
            assert np.array_equal(param.numpy(), expected.params[index]), (step, index)
    for worker, states in enumerate(run.kept):
        for index, state in enumerate(states):
            for kept in state.values():
                assert np.array_equal(kept.numpy(), expected.kept[worker][index])


@RULES
def test_what_a_rule_keeps(rule: Aggregation) -> None:
    state_exam.check_what_is_kept(rule)


@RULES
def test_a_rule_is_rebuilt_from_its_text(rule: Aggregation) -> None:
    assert parse_rule(repr(rule)) == rule
    assert hash(parse_rule(repr(rule))) == hash(rule)


@RULES
def test_a_vote_has_no_partial_counts(rule: Aggregation) -> None:
    shape = rule.shape(make_bucket(3), 3)
    assert shape.plane_bytes is None
    words = shape.vote_bytes - shape.scales_bytes
    assert words == rule.vote_planes * (shape.reply_bytes - shape.reply_scales_bytes)
    assert shape.scales_bytes == pad_bytes(4 * rule.n_scales * len(SIZES))
    assert shape.reply_scales_bytes == pad_bytes(4 * len(SIZES))
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        shape.sum_chunk(2)


@RULES
def test_a_vote_that_weighs_twice_counts_as_two(rule: Aggregation) -> None:
    """State grows apart from a second worker of the same deltas by its coins alone."""
    bucket, kernels = make_bucket(2), KERNELS["core"]
    weighted = Roster((0, 1), (0, 1), (2, 1))
    rows = Run(rule, 2, kernels)
    segments = [rows.segments(worker, draw_deltas(worker, 0)) for worker in range(2)]
    votes = torch.stack([rows.encode(worker, mine) for worker, mine in enumerate(segments)])
    present = torch.tensor([[s.grad is not None for s in mine] for mine in segments])
    flat, coins = votes.view(2, -1), Coins(SEED, 0, 0)
    once = rule.start(bucket, weighted).count(kernels, flat, present, 0, coins)
    thrice = Roster((0, 1, 2), (0, 1), (1, 1, 1))
    order = [0, 0, 1]
    again = rule.start(bucket, thrice).count(kernels, flat[order], present[order], 0, coins)
    read = rule.start(bucket, weighted)
    assert torch.equal(read.read_reply(once), read.read_reply(again))
    first, second = (read.read_scales(each) for each in (once, again))
    assert torch.allclose(first, second, rtol=1e-6)


def test_lots_follow_the_size_of_a_delta() -> None:
    """Of many equal elements as many vote plus as their probability says, to 5 sigma."""
    n, ratio = 1 << 16, 0.25
    delta = torch.full((n,), ratio)
    delta[0] = 1.0
    (slot,) = place_parameters(["p"], [n])
    segment = Segment(slot, torch.zeros(n), delta, torch.zeros(n), Coefficients(0, 0, 1.0, 0.0))
    (bucket,) = fill_buckets([slot], [0], n_shards=1, bucket_elements=n)
    out = torch.empty(bucket.n_blocks, 1, 8, dtype=torch.int64)
    distlion.StochasticVote().encode(KERNELS["core"], [segment], Coins(0, 0, 0), out=out)
    ones = int(np.unpackbits(out.numpy().view(np.uint8)).sum())
    p = (1 + ratio) / 2
    assert abs(ones - n * p) < 5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf])
@RULES
def test_a_delta_that_is_not_finite_is_told(rule: Aggregation, value: float) -> None:
    run = Run(rule, 2, KERNELS["core"])
    deltas = draw_deltas(0, 0)
    deltas[2][3] = value  # type: ignore[index]
    segments, coins = run.segments(0, deltas), Coins(SEED, 0, 0)
    kept = run.kept[0] if rule.worker_state else ()
    votes, finite = run.workers[0].encode(
        run.kernels, segments, kept, coins, device=torch.device("cpu")
    )
    assert finite.tolist() == [index != 2 for index in range(len(SIZES))]
    assert votes.view(torch.uint8).numel() == run.counter.shape.vote_bytes * 2
    run.workers[0].note()
    assert not any(each.any() for each in run.kept[0][2].values())


@pytest.mark.parametrize("make", [distlion.DistributedLion, distlion.VirtualCluster])
@RULES
def test_an_optimizer_with_steps_of_one_length_refuses(rule: Aggregation, make: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    options = {"workers": 2} if make is distlion.VirtualCluster else {}
    with pytest.raises(InvalidArgumentError, match="Give it to LocalSteps"):
        make(params, aggregation=rule, **options)

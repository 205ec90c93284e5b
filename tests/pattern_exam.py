"""The exam of a pattern: the bits, bytes and verdicts that every one must bring back.

    for check in pattern_exam.CHECKS:
        check(AllGather())

Ranks are ends of a network inside this process (loopback.py), and votes are opaque bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

import distlion.wire
from distlion import faults
from distlion.failures import Status
from distlion.layout import BucketShape
from distlion.votes import MajorityVote
from distlion.wire import Exchange
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.pattern import Ballot, Exchanging, Reply
from distlion.wire.verdict import Verdict
from loopback import CountingKernels, Crossed, make_links, run_together
from memory_link import Memory

STEP, BUCKET, SETTINGS = 7, 4, 99
WORLD_SIZES = (1, 2, 3, 5, 8)
# Ranks among all workers, which verdicts name: those of a link may be a part of them.
FIRST_RANK = 10
# The member on which something is wrong.
CULPRIT = 1
RANK = FIRST_RANK + CULPRIT
MANY_ELEMENTS = 1 << 22
"""A chunk of so many elements has 128 bytes of frame, and up to 511 elements of padding."""


def make_shape(
    n: int, *, n_params: int = 3, vote_bytes: int = 64, has_counts: bool = True
) -> BucketShape:
    """Size a bucket as ``ByteSums`` counts it."""
    return BucketShape(n, n_params, vote_bytes, 2 * vote_bytes, has_counts, vote_bytes // 8)


SHAPES: dict[str, dict[str, int | bool]] = {
    "small": {},
    "parameters without elements": {"vote_bytes": 0},
    "without counts": {"has_counts": False},
    "a large bitmap": {"n_params": 600},
    # More than what Link.all_gather sends to everybody at once.
    "large": {"vote_bytes": 1 << 16, "has_counts": False},
}
TRIALS = [
    (n, sizes)
    for n in WORLD_SIZES
    for name, sizes in SHAPES.items()
    if name != "large" or n in (2, 5)
]
"""Sums of large votes take seconds: they are of an even and of an odd number of workers."""


class ByteSums:
    """A rule over opaque bytes, as an exam needs it.

    Equation:
        reply = 2 bytes for each of a vote: sum_i w_i vote_i + number of the shard, and how many
        voted; w_i = i + 1, or 1 in parts, which do not know of ranks
    """

    def __init__(self, shape: BucketShape, *, is_weighted: bool) -> None:
        self._shape, self._is_weighted = shape, is_weighted
        self.counted_bytes = 0

    def _settle(self, sums: Tensor, n_present: Tensor, first_shard: int) -> Tensor:
        if not self._shape.vote_bytes:
            return sums.view(torch.uint8)
        shards = sums.view(-1, self._shape.vote_bytes)
        numbers = torch.arange(first_shard, first_shard + len(shards))[:, None]
        counts = n_present[0].expand_as(shards)
        return torch.stack([shards + numbers, counts], dim=-1).to(torch.uint8).flatten()

    def start_sum(self, votes: Tensor, present: Tensor) -> Tensor:
        self.counted_bytes += votes.numel()
        return self._pack(votes.int() * present[:1].int(), 1)

    def add_sums(self, first: Tensor, second: Tensor, n_votes: int) -> Tensor:
        self.counted_bytes += first.numel() + second.numel()
        return self._pack(self._unpack(first) + self._unpack(second), n_votes)

    def settle_sum(self, total: Tensor, n_present: Tensor) -> Tensor:
        return self._settle(self._unpack(total), n_present, 0)

    @property
    def _n_elements(self) -> int:
        return self._shape.n_shards * self._shape.vote_bytes

    def _pack(self, sums: Tensor, n_votes: int) -> Tensor:
        """Write the bits of sums, plane after plane."""
        planes = torch.arange((255 * n_votes).bit_length(), dtype=torch.int32)[:, None]
        bits = ((sums.int() >> planes) & 1).numpy().astype(np.uint8)
        return torch.from_numpy(np.packbits(bits.reshape(-1), bitorder="little"))

    def _unpack(self, packed: Tensor) -> Tensor:
        if not packed.numel():
            return torch.zeros(0, dtype=torch.int32)
        bits = np.unpackbits(packed.numpy(), bitorder="little").reshape(-1, self._n_elements)
        places = 1 << np.arange(len(bits), dtype=np.int32)
        return torch.from_numpy((bits * places[:, None]).sum(0, dtype=np.int32))

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        self.counted_bytes += votes.numel()
        weights = torch.arange(1, len(votes) + 1) if self._is_weighted else torch.ones(len(votes))
        counted = votes.int() * present[:, :1] * weights[:, None].int()
        return self._settle(counted.sum(0, dtype=torch.int32), present.sum(0), first_shard)

    def count_present(self, present: Tensor) -> Tensor:
        return present.sum(0)


@dataclass
class Trial:
    """One exchange of ``n`` ranks, of random votes, where the last rank misses one parameter."""

    pattern: Exchange
    n: int
    sizes: Mapping[str, int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = make_shape(self.n, **self.sizes)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(self.n)
        size = (self.n, self.n, self.shape.vote_bytes)
        self.votes = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        self.present = torch.ones(self.n, self.shape.n_params, dtype=torch.bool)
        self.present[-1, 0] = False
        self.headers = [
            Header(
                ChunkKind.VOTE, STEP, BUCKET, rank, SETTINGS, gradient_digest=100 + rank, epoch=7
            )
            for rank in range(self.n)
        ]
        self.links = make_links(self.n)
        for link in self.links:
            link.ranks = tuple(range(FIRST_RANK, FIRST_RANK + self.n))
        self.reducers = [self.make_reducer() for _ in self.links]

    def make_reducer(self) -> ByteSums:
        return ByteSums(self.shape, is_weighted=not self.pattern.counts_in_parts)

    @property
    def expected(self) -> Tensor:
        """Count all votes in one place."""
        reply = self.make_reducer().reduce(self.votes.flatten(1), self.present, 0)
        return reply.view(self.n, -1)

    def start(self) -> list[Exchanging[Reply]]:
        return [
            self.pattern.exchange(
                link,
                self.shape,
                Ballot(self.headers[rank], self.votes[rank], self.present[rank]),
                self.reducers[rank],
            )
            for rank, link in enumerate(self.links)
        ]

    def run(self) -> list[Reply]:
        replies, self.n_transfers = run_together(self.start())
        return replies

    def verdict(self) -> Verdict:
        """What all ranks agree on."""
        verdicts = {reply.verdict for reply in self.run()}
        (verdict,) = verdicts
        return verdict


def check_replies(pattern: Exchange) -> None:
    """Every rank gets the reply that one place would give to all votes, and who voted."""
    for n, sizes in TRIALS:
        trial = Trial(pattern, n, sizes)
        for reply in trial.run():
            assert reply.verdict == Verdict(Status.OK)
            assert torch.equal(reply.payload, trial.expected)
            if trial.shape.has_counts:
                assert torch.equal(reply.present, trial.present.sum(0))
            assert torch.equal(reply.present > 0, trial.present.any(0))


def check_plans(pattern: Exchange) -> None:
    """A rank sends what the plan declares, in as many transfers, and all that is sent arrives."""
    for n, sizes in TRIALS:
        trial = Trial(pattern, n, sizes)
        trial.run()
        plans = [pattern.plan(trial.shape, rank) for rank in range(n)]
        assert [link.counted for link in trial.links] == plans
        assert sum(plan.sent_bytes - plan.received_bytes for plan in plans) == 0
        assert pattern.plan_total(trial.shape) == sum(plan.sent_bytes for plan in plans)
        assert trial.n_transfers == pattern.count_transfers(n)


def check_work(pattern: Exchange) -> None:
    """The busiest rank does the work that is declared."""
    for n in WORLD_SIZES[1:]:
        trial = Trial(pattern, n)
        trial.run()
        work = pattern.cost(trial.shape)
        frames = max(cast(CountingKernels, link.kernels).n_rows for link in trial.links)
        assert frames == work.frames_written + work.frames_read
        assert max(reducer.counted_bytes for reducer in trial.reducers) == work.counted_bytes
        assert work.rounds >= pattern.count_transfers(n)
        assert max(link.gathered_bytes for link in trial.links) == work.gathered_bytes


def check_busiest(pattern: Exchange) -> None:
    """No rank is busier than the first and the last."""
    rule = MajorityVote(tie="zero")
    for n in range(2, 9):
        shape = rule.shape_of(MANY_ELEMENTS, n)
        sent = [pattern.plan(shape, rank).sent_bytes for rank in range(n)]
        assert max(sent) == max(sent[0], sent[-1])


def check_errors(pattern: Exchange) -> None:
    """What one worker says of an error is the verdict of all."""
    error = {"status": Status.NON_FINITE, "culprit": RANK, "position": 2}
    for n in WORLD_SIZES[1:]:
        trial = Trial(pattern, n)
        trial.headers[CULPRIT] = replace(trial.headers[CULPRIT], **error)  # type: ignore[arg-type]
        found = replace(trial.verdict(), steps=())
        assert found == Verdict(Status.NON_FINITE, (RANK,), position=2)


def check_disagreement(pattern: Exchange) -> None:
    """Who is at another step, or has other settings, is named by all, with everybody's step."""
    for change, status in (({"step": STEP - 1}, Status.STEP), ({"settings": 98}, Status.CONFIG)):
        trial = Trial(pattern, 3)
        trial.headers[CULPRIT] = replace(trial.headers[CULPRIT], **change)
        steps = tuple((FIRST_RANK + header.sender, header.step) for header in trial.headers)
        assert trial.verdict() == Verdict(status, (RANK,), steps=steps)


def check_cancellation(pattern: Exchange) -> None:
    """A step that is given up is so by all or by some, and everybody knows which."""
    for givers in ((CULPRIT,), (0, 1, 2)):
        trial = Trial(pattern, 3)
        for member in givers:
            trial.headers[member] = replace(
                trial.headers[member],
                status=Status.CANCELLED,
                culprit=FIRST_RANK + member,
                cancelled_by_all=True,
            )
        verdict = trial.verdict()
        assert verdict.status is Status.CANCELLED
        assert verdict.cancelled_by_all is (len(givers) == 3)
        assert RANK in verdict.culprits


def check_last_step(pattern: Exchange) -> None:
    """Whoever says that the epoch ends with this step, all know it, and the votes count."""
    for n in WORLD_SIZES:
        for member in {0, n // 2, n - 1}:
            trial = Trial(pattern, n)
            trial.headers[member] = replace(trial.headers[member], ends_epoch=True)
            for reply in trial.run():
                assert reply.verdict == Verdict(Status.OK, ends_epoch=True)
                assert torch.equal(reply.payload, trial.expected)
        assert not Trial(pattern, n).verdict().ends_epoch


def check_damage(pattern: Exchange) -> None:
    """A damaged vote is found by all, wherever the bit is."""
    for byte in (0, 70, 130):
        trial = Trial(pattern, 3)

        def damage(chunks: object, byte: int = byte) -> None:
            assert isinstance(chunks, Tensor)
            chunks.view(-1)[byte] ^= 1
            faults.disarm_all()  # of that rank's votes only, not of its reply

        fault = faults.arm(rank=RANK, step=STEP, point="framed", action=damage)
        try:
            verdict = trial.verdict()
        finally:
            faults.disarm_all()
        assert fault.fired == 1
        assert (verdict.status, verdict.culprits) == (Status.CORRUPT, (RANK,))


def check_mixed_buckets(pattern: Exchange) -> None:
    """If the bytes of two buckets under way are swapped, neither bucket accepts them."""
    for culprit in (0, CULPRIT):
        n_refused = 0
        for mixed in range(pattern.count_transfers(3)):
            trials = Trial(pattern, 3), Trial(pattern, 3)
            trials[1].votes, trials[1].links = 255 - trials[0].votes, trials[0].links
            trials[1].headers = [replace(each, bucket=BUCKET + 1) for each in trials[0].headers]
            crossed = Crossed(trials[0].links[culprit], mixed)
            trials[0].links[culprit] = cast(Memory, crossed)
            replies, _ = run_together([each for trial in trials for each in trial.start()])
            for trial, reply in zip(trials, replies[culprit::3], strict=True):
                is_refused = reply.verdict.status is Status.CORRUPT
                n_refused += is_refused
                # Or it did not read it: a server knows what it sends to itself.
                assert is_refused or torch.equal(reply.payload, trial.expected)
        assert n_refused > 0


def check_digests(pattern: Exchange) -> None:
    """Digests of gradients come back to whoever reads all headers, at least to the first."""
    found = [reply.gradient_digests for reply in Trial(pattern, 3).run()]
    assert found[0] == (100, 101, 102)
    assert set(found) <= {(100, 101, 102), ()}


def check_repr(pattern: Exchange) -> None:
    """A pattern's text rebuilds it."""
    names = {type(pattern).__name__: type(pattern), **vars(distlion.wire)}
    assert eval(repr(pattern), names) == pattern


CHECKS: tuple[Callable[[Exchange], None], ...] = (
    check_replies,
    check_plans,
    check_work,
    check_busiest,
    check_errors,
    check_disagreement,
    check_cancellation,
    check_last_step,
    check_damage,
    check_mixed_buckets,
    check_digests,
    check_repr,
)

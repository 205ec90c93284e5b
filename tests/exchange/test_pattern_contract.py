"""What every pattern must do, whatever its rule: one exam for all of the registry and a toy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from distlion import faults
from distlion.errors import InvalidArgumentError
from distlion.exchange import (
    PATTERNS,
    AllReduce,
    Ballot,
    ByteCount,
    ChunkKind,
    Exchange,
    Header,
    PartialReducer,
    Reply,
    Status,
    Verdict,
    with_error,
)
from distlion.exchange.frame import write_chunk
from distlion.layout import BucketShape
from loopback import make_links, run_together
from two_levels import TwoLevels

STEP, N_PARAMS = 7, 3
WORLD_SIZES = (1, 2, 3, 5)


class ByteSums:
    """A rule over opaque bytes, as an exam needs it.

    Equation:
        reply = 2 bytes for each of a vote: sum_i w_i vote_i + number of the shard, and how many
        voted; w_i = i + 1, or 1 in parts, which do not know of ranks
    """

    def __init__(self, shape: BucketShape, *, is_weighted: bool) -> None:
        self._shape, self._is_weighted = shape, is_weighted
        self.counted_bytes = 0

    @property
    def parts(self) -> PartialReducer:
        return self

    def tally(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        self.counted_bytes += votes.numel()
        weights = torch.arange(1, len(votes) + 1) if self._is_weighted else torch.ones(len(votes))
        counted = votes.int() * present[:, :1] * weights[:, None].int()
        return counted.sum(0, dtype=torch.int32).view(torch.uint8)

    def combine(self, tallies: Tensor) -> Tensor:
        return tallies.contiguous().view(torch.int32).sum(0, dtype=torch.int32).view(torch.uint8)

    def settle(self, tally: Tensor, n_present: Tensor, first_shard: int) -> Tensor:
        shards = tally.contiguous().view(torch.int32).view(-1, self._shape.vote_bytes)
        numbers = torch.arange(first_shard, first_shard + len(shards))[:, None]
        counts = n_present[0].expand_as(shards)
        return torch.stack([shards + numbers, counts], dim=-1).to(torch.uint8).flatten()

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        return self.settle(self.tally(votes, present, first_shard), present.sum(0), first_shard)


EXAMINED = [*PATTERNS.values(), TwoLevels()]
each_pattern = pytest.mark.parametrize("pattern", EXAMINED, ids=repr)


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.disarm_all()


@dataclass
class Trial:
    """One exchange of ``n`` ranks, of random votes, where the last rank misses one parameter."""

    pattern: Exchange
    n: int
    has_counts: bool = True

    def __post_init__(self) -> None:
        self.shape = BucketShape(self.n, N_PARAMS, 64, 128, self.has_counts, tally_bytes=256)
        generator = torch.Generator().manual_seed(self.n)
        self.votes = torch.randint(
            256, (self.n, self.n, 64), generator=generator, dtype=torch.uint8
        )
        self.present = torch.ones(self.n, N_PARAMS, dtype=torch.bool)
        self.present[-1, 0] = False
        self.headers = [
            Header(ChunkKind.VOTE, STEP, 4, rank, 99, gradient_digest=10 + rank)
            for rank in range(self.n)
        ]
        self.links = make_links(self.n)
        is_weighted = not isinstance(self.pattern, TwoLevels)
        self.reducers = [ByteSums(self.shape, is_weighted=is_weighted) for _ in self.links]

    @property
    def expected(self) -> Tensor:
        reducer = ByteSums(self.shape, is_weighted=not isinstance(self.pattern, TwoLevels))
        return reducer.reduce(self.votes.flatten(1), self.present, 0).view(self.n, -1)

    def run(self) -> list[Reply]:
        exchanges = [
            self.pattern.exchange(
                link,
                self.shape,
                Ballot(self.headers[rank], self.votes[rank], self.present[rank]),
                self.reducers[rank],
            )
            for rank, link in enumerate(self.links)
        ]
        replies, self.n_transfers = run_together(exchanges)
        return replies

    def verdict(self) -> Verdict:
        """What all ranks agree on."""
        verdicts = {reply.verdict for reply in self.run()}
        (verdict,) = verdicts
        return verdict


@each_pattern
@pytest.mark.parametrize("n", WORLD_SIZES)
def test_every_rank_gets_the_reply_to_all_votes(pattern: Exchange, n: int) -> None:
    trial = Trial(pattern, n)
    for reply in trial.run():
        assert reply.verdict == Verdict(Status.OK)
        assert torch.equal(reply.payload, trial.expected)
        assert torch.equal(reply.present, trial.present.sum(0))


@each_pattern
@pytest.mark.parametrize("n", WORLD_SIZES)
def test_without_counts_a_reply_tells_who_has_a_voter(pattern: Exchange, n: int) -> None:
    trial = Trial(pattern, n, has_counts=False)
    for reply in trial.run():
        assert torch.equal(reply.payload, trial.expected)
        assert torch.equal(reply.present > 0, trial.present.any(0))


@each_pattern
@pytest.mark.parametrize("n", WORLD_SIZES)
def test_a_rank_sends_what_the_plan_declares(pattern: Exchange, n: int) -> None:
    trial = Trial(pattern, n)
    trial.run()
    counted = [link.counted for link in trial.links]
    assert counted == [pattern.plan(trial.shape, rank) for rank in range(n)]
    assert trial.n_transfers == pattern.transfers


@each_pattern
@pytest.mark.parametrize("n", WORLD_SIZES[1:])
def test_the_busiest_rank_does_the_work_that_is_declared(pattern: Exchange, n: int) -> None:
    trial = Trial(pattern, n)
    trial.run()
    work = pattern.work(trial.shape)
    frames = max(link.counting.n_rows for link in trial.links)
    assert frames == work.frames_written + work.frames_read
    assert max(reducer.counted_bytes for reducer in trial.reducers) == work.counted_bytes


@each_pattern
@pytest.mark.parametrize("n", WORLD_SIZES[1:])
def test_an_error_in_a_header_reaches_all_ranks(pattern: Exchange, n: int) -> None:
    trial = Trial(pattern, n)
    trial.headers[1] = with_error(trial.headers[1], Status.NON_FINITE, culprit=1, position=2)
    verdict = trial.verdict()
    assert (verdict.status, verdict.culprits) == (Status.NON_FINITE, (1,))
    assert verdict.position == 2


@each_pattern
def test_a_rank_at_another_step_is_named_by_all(pattern: Exchange) -> None:
    trial = Trial(pattern, 3)
    trial.headers[1] = replace(trial.headers[1], step=STEP - 1)
    verdict = trial.verdict()
    assert (verdict.status, verdict.culprits) == (Status.STEP, (1,))
    assert verdict.steps == ((0, STEP), (1, STEP - 1), (2, STEP))


@each_pattern
def test_a_rank_with_other_settings_is_named_by_all(pattern: Exchange) -> None:
    trial = Trial(pattern, 3)
    trial.headers[1] = replace(trial.headers[1], settings=98)
    verdict = trial.verdict()
    assert (verdict.status, verdict.culprits) == (Status.CONFIG, (1,))


@each_pattern
@pytest.mark.parametrize("byte", [0, 70, 130])
def test_a_damaged_vote_is_found_by_all(pattern: Exchange, byte: int) -> None:
    trial = Trial(pattern, 3)

    def damage(chunks: object) -> None:
        assert isinstance(chunks, Tensor)
        chunks.view(-1)[byte] ^= 1
        faults.disarm_all()  # of that rank's votes only, not of its reply

    fault = faults.arm(rank=1, step=STEP, point="framed", action=damage)
    verdict = trial.verdict()
    assert fault.fired == 1
    assert (verdict.status, verdict.culprits) == (Status.CORRUPT, (1,))


@pytest.mark.parametrize("pattern", [*PATTERNS.values()], ids=repr)
def test_gradient_digests_come_back_to_whoever_reads_all_headers(pattern: Exchange) -> None:
    found = [reply.gradient_digests for reply in Trial(pattern, 3).run()]
    assert found[0] == (10, 11, 12)
    assert set(found) <= {(10, 11, 12), ()}


def test_owners_that_disagree_on_presence_are_found() -> None:
    """One rank tells the first owner, with a fitting checksum, that it votes for nothing."""
    trial = Trial(AllReduce(), 3)
    shape, present = trial.shape.vote_chunk, torch.zeros(N_PARAMS, dtype=torch.bool)

    def forge(chunks: object) -> None:
        assert isinstance(chunks, Tensor)
        payload = chunks[0, shape.front_bytes :].clone()
        kernels = trial.links[1].kernels
        write_chunk(kernels, chunks[0], shape, trial.headers[1], present, payload)
        faults.disarm_all()

    fault = faults.arm(rank=1, step=STEP, point="framed", action=forge)
    assert trial.verdict() == Verdict(Status.CORRUPT)
    assert fault.fired == 1


def test_votes_that_cannot_be_counted_in_parts_are_refused_before_anything_is_sent() -> None:
    trial = Trial(TwoLevels(), 2)
    trial.shape = replace(trial.shape, tally_bytes=0)
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        trial.run()
    assert [link.counted for link in trial.links] == [ByteCount()] * 2

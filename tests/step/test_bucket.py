"""A bucket from the votes to the reply, between ends of a network inside this process."""

from __future__ import annotations

import pytest
import torch

import matrix
from distlion.failures import Status
from distlion.kernels import Coefficients, Coins, Segment, choose_kernels
from distlion.layout import BucketLayout, Slot
from distlion.step.bucket import Bucket
from distlion.step.param import Make, VotingParam
from distlion.votes import Aggregation, Roster
from distlion.votes.bucket_vote import make_worker_state
from distlion.wire import Exchange
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.verdict import Verdict
from loopback import CPU, make_links, run_together

N_WORKERS = 3
KERNELS = choose_kernels(CPU)
HYPER = Coefficients(0.9, 0.99, 0.1, 0.1)
EMPTY = BucketLayout(0, (0, 1), (Slot("empty", 0, 3, 0, 7), Slot("also", 0, 3, 0)), N_WORKERS)
CASES = {
    f"{rule_name}, {pattern_name}": (rule, pattern)
    for rule_name, rule in {**matrix.LISTED, **matrix.DELTA_RULES}.items()
    for pattern_name, pattern in matrix.PATTERNS.items()
    if matrix.carries(pattern, rule)
}


def make_params(rule: Aggregation) -> tuple[VotingParam, ...]:
    """Make the parameters of ``EMPTY``: shards without elements, with what the rule keeps."""
    params = []
    for position, slot in enumerate(EMPTY.slots):
        values = torch.zeros(0)
        kept = {"exp_avg": torch.zeros(0), **make_worker_state(rule, values)}
        make = Make.of(values)
        params.append(
            VotingParam(values, position, 0, slot, rule, {values: kept}, ((0, 0),), make, make)
        )
    return tuple(params)


@pytest.mark.parametrize(("rule", "pattern"), CASES.values(), ids=CASES)
def test_a_bucket_without_elements_takes_part(rule: Aggregation, pattern: Exchange) -> None:
    roster = Roster.of(N_WORKERS)
    buckets = [
        Bucket(EMPTY, make_params(rule), rule.start(EMPTY, roster), pattern, CPU, KERNELS, link)
        for link in make_links(N_WORKERS)
    ]
    segments = [Segment(slot, *torch.zeros(3, 0), HYPER) for slot in EMPTY.slots]
    exchanges = []
    for rank, bucket in enumerate(buckets):
        votes, finite = bucket.encode(segments, Coins(0, 0, rank))
        header = Header(ChunkKind.VOTE, 0, 0, rank, 99)
        exchanges.append(bucket.exchange(header, votes, finite.tolist(), Coins(0, 0, rank)))
    replies, _ = run_together(exchanges)
    for bucket, reply in zip(buckets, replies, strict=True):
        assert reply.verdict == Verdict(Status.OK)
        assert (reply.present > 0).all()
        bucket.segments, bucket.reply = segments, reply
        bucket.commit([HYPER], None)

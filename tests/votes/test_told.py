"""What workers tell a counter lies where the shards lie that it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from distlion.layout import fill_buckets, place_parameters
from distlion.votes import MajorityVote, Roster

SIZES, N_SHARDS = (5, 700, 0, 64), 3


@dataclass(frozen=True)
class Remembering(MajorityVote):
    """Keeps two things of each parameter."""

    worker_state: ClassVar[tuple[str, ...]] = ("first", "second")


def test_every_owner_is_told_of_its_own_shard() -> None:
    slots = place_parameters([str(size) for size in SIZES], SIZES)
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=N_SHARDS, bucket_elements=10**6)
    vote = Remembering().start(bucket, Roster.of(N_SHARDS))
    kept = [
        {"first": torch.arange(1.0, n + 1), "second": -torch.arange(1.0, n + 1)}
        for n in (slot.n_elements for slot in bucket.slots)
    ]
    told = vote.export_state(kept)
    assert told.shape == (N_SHARDS, vote.state_shape.vote_bytes)
    values = told.view(torch.float32).view(N_SHARDS, 2, -1)
    assert torch.equal(values[:, 0], -values[:, 1])
    whole = values[:, 0].reshape(-1)
    for slot, state in zip(bucket.slots, kept, strict=True):
        start = 64 * slot.bucket_word
        assert torch.equal(whole[start : start + slot.n_elements], state["first"])
    assert int(whole.count_nonzero()) == sum(slot.n_elements for slot in bucket.slots)

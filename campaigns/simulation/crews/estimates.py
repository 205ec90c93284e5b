"""What votes with error feedback have said of directions: as voters know it, and who counts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from distlion.crew import CrewLion

NOTHING = 0
"""The checksum of those who have said nothing."""

Said = dict[tuple[int, int, int], int]
"""By bucket, shard and place of the voter: a checksum of what its votes have said."""


def find_said(optimizer: CrewLion, place: int) -> tuple[Said, Said]:
    """Return what this worker has said, and what it holds of all of them for what it counts."""
    own: Said = {}
    held: Said = {}
    for number, vote, kept in _list_votes(optimizer):
        shards = vote.export_state(kept)
        for shard, row in enumerate(shards):
            own[number, shard, place] = _check(row)
        everybody = vote._everybody
        if everybody is not None:
            parts = everybody.view(len(everybody), -1, shards.shape[1] // 4)
            first = 0 if parts.shape[1] == len(shards) else place
            for voter, rows in enumerate(parts):
                for offset, row in enumerate(rows):
                    held[number, first + offset, voter] = _check(row)
    return own, held


def _list_votes(optimizer: CrewLion) -> Iterator[tuple[int, Any, list[Any]]]:
    for number, bucket in enumerate(optimizer._session.routing.buckets):
        if bucket.rule.worker_state:
            yield number, bucket.vote, [param.worker_state for param in bucket.own]  # type: ignore[attr-defined]


def _check(row: Tensor) -> int:
    return zlib.crc32(row.contiguous().numpy().tobytes()) if row.any() else NOTHING

"""A rule with state: all that it takes, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distlion.kernels import Coins, Kernels, Segment
from distlion.kernels.words import split_planes, unpack
from distlion.layout import BucketLayout
from distlion.votes import MajorityVote, Roster
from distlion.votes.bucket_vote import BucketVote, WorkerState


@dataclass(frozen=True)
class LeaningVote(MajorityVote):
    """Vote with one bit on c + h, where h is half of what the worker voted last."""

    worker_state: ClassVar[tuple[str, ...]] = ("last",)

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return _LeaningBucket(self, bucket, roster)


class _LeaningBucket(BucketVote):
    """Drafts beside what is kept, as every rule with state must."""

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        leaning = [
            segment._replace(exp_avg=segment.exp_avg.float() + state["last"] / 2)
            for segment, state in zip(segments, kept, strict=True)
        ]
        votes, finite = super()._encode(kernels, leaning, kept, coins, device=device)
        (plane,) = split_planes(votes.view(torch.int64).view(self.bucket.n_blocks, 1, -1))
        self.drafted: list[tuple[Tensor, Tensor]] = []
        for index, (segment, state) in enumerate(zip(segments, kept, strict=True)):
            slot, last = segment.slot, state["last"]
            if segment.grad is not None and bool(finite[index]):
                words = plane[slot.bucket_word : slot.bucket_word + slot.n_words]
                signs = 2.0 * unpack(words[None], slot.n_elements)[0].float() - 1
                self.drafted.append((last, signs.view_as(last)))
        return votes, finite

    def note(self) -> None:
        for last, signs in getattr(self, "drafted", ()):
            last.copy_(signs)
        self.drafted = []

"""Majority votes on deltas: one bit up, one bit and a step length down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.layout import BLOCK_WORDS, BucketLayout
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import BucketVote, WorkerState
from distlion.votes.roster import Roster


@dataclass(frozen=True)
class ScaledVote(Aggregation):
    """Move every element of a delta by the majority's sign and the workers' mean magnitude.

    Equation:
        vote_i = sign(d_i), a_i = mean |d_i| over the parameter
        x = x - lr * s * S,  S = sign(sum_i vote_i),  s = mean_i a_i
        (signSGD with majority vote, arXiv:1810.05291, with the scale of scaled signs,
        arXiv:1901.09847, and without error feedback)

    Only ``LocalSteps`` takes this rule: the magnitude of its deltas matters.

    Notes:
        A vote carries one float32 for each parameter, a reply one for each parameter and shard.
        Both means are over the workers present. A d_i that is exactly 0 votes by its worker's coin;
        a common coin breaks ties.
    """

    vote_planes = 1
    vote_format = VoteFormat.STEP
    reply_format = ReplyFormat.SIGN
    n_scales = 1
    n_reply_scales = 1

    def reply_planes(self, n_votes: int) -> int:
        return 1

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return ScaledBucket(self, bucket, roster)

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write the bits of a vote, without its scales."""
        scales = torch.empty(len(segments), self.n_scales, dtype=torch.float32, device=out.device)
        return self.encode_scaled(kernels, segments, coins, out=out, scales=scales)

    def encode_scaled(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        coins: Coins,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        """Write the bits and the scales of a vote; arguments and flags as ``encode_rests``."""
        return kernels.encode_rests(segments, None, coins.zero, out=out, scales=scales)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_signs(votes, coins.tie, out=out)


class ScaledBucket(BucketVote):
    """The vote on one bucket: signs are counted one by one; the reply has the mean scale."""

    rule: ScaledVote

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        votes = self._make_votes(device)
        scales = torch.zeros(len(self.bucket.slots), 1, dtype=torch.float32, device=device)
        finite = self.rule.encode_scaled(
            kernels, segments, coins, out=votes, scales=scales[: len(segments)]
        )
        return self._join_votes(votes, scales), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        rows = list(self.roster.counted_rows)
        packed, scales = self._split_votes(votes)
        first_block = first_shard * self.bucket.shard_blocks
        cast = BlockVotes(packed, self.roster.weigh(present), self.bucket, first_block)
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        self.rule.count(kernels, cast, coins, out=out)
        means = mean_scales(scales[rows, :, 0], present[rows])
        return self._join_reply(out, means.expand(self._count_shards(votes), -1))


def mean_scales(scales: Tensor, present: Tensor) -> Tensor:
    """Average the scales of the workers present, added in double in rank order.

    Args:
        scales: (votes, n_params) float32.
        present: (votes, n_params) bool on the CPU.

    Returns:
        (n_params,) float32; 0 where nobody is present.
    """
    total = torch.zeros(scales.shape[1], dtype=torch.float64, device=scales.device)
    here = present.to(scales.device)
    for row, is_present in zip(scales.double(), here, strict=True):
        total += row * is_present
    return (total / here.sum(0).clamp(min=1)).float()

"""One or two bits up, one bit and a step length down; votes carry rounding errors forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import Kernels, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.lots import read_directions
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout
from distlion.votes.bucket_vote import BucketVote, WorkerState
from distlion.votes.feedback import FeedbackVote, as_votes
from distlion.votes.roster import Roster
from distlion.votes.scaled import ScalingVote, make_zeros

_RESIDUAL = "residual"


@dataclass(frozen=True)
class ResidualVote(FeedbackVote):
    """Vote on deltas plus the parts of them that earlier votes rounded away.

    Equation:
        r_i = d_i + e_i;  q_i = sign(r_i) * a_i;  e_i <- d_i - (q_i - e_i)
        x = x - lr * s * S,  S = sign(sum_i q_i),
        s = mean |sum_i q_i| / n over the parameter's elements in the shard, n workers present
        one bit:  a_i = mean |r_i| over the parameter
        two bits: as for ``FeedbackVote``, of r_i
        (EF-signSGD, arXiv:1901.09847, Algorithm 1, with scaled signs both ways)

    Only ``LocalSteps`` takes this rule.

    Args:
        bits: 1 or 2.

    Raises:
        InvalidArgumentError: ``bits`` is out of range.
        UnsupportedTypeError: ``bits`` is not an integer.

    Notes:
        Each worker keeps e_i in float32, in ``state[param]["residual"]``; counting keeps no state.
        A worker that abstains sends nothing and keeps its residual. A vote carries ``bits`` float32
        scales for each parameter, a reply one for each parameter and shard. Where r_i is exactly 0
        its worker's coin decides, where the sum is exactly 0 a common coin.
    """

    worker_state: ClassVar[tuple[str, ...]] = (_RESIDUAL,)

    bits: int = 1

    @property
    def n_reply_scales(self) -> int:
        return 1

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return _ResidualBucket(self, bucket, roster)

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write the bits of a first vote, with all residuals 0, without its scales."""
        scales = torch.empty(len(segments), self.n_scales, dtype=torch.float32, device=out.device)
        nothing = make_zeros(segments, device=out.device)
        return kernels.encode_rests(segments, nothing, coins.zero, out=out, scales=scales)


class _ResidualBucket(ScalingVote):
    """The vote on one bucket, with a draft's residuals; others are in the optimizer's state."""

    def __init__(self, rule: ResidualVote, bucket: BucketLayout, roster: Roster) -> None:
        super().__init__(rule, bucket, roster)
        # (residual, its value after the vote) of each parameter.
        self._drafted: Sequence[tuple[Tensor, Tensor]] = ()

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        residuals = [state[_RESIDUAL] for state in kept]
        votes, slots = self._make_votes(device), self.bucket.slots
        scales = torch.zeros(len(slots), self.rule.n_scales, dtype=torch.float32, device=device)
        # The negative residual takes the place of an estimate h, as ops compute d - h.
        excess = [-residual for residual in residuals]
        finite = kernels.encode_rests(
            segments, excess, coins.zero, out=votes, scales=scales[: len(segments)]
        )
        present = [segment.grad is not None for segment in segments]
        after = kernels.add_steps(excess, slots, present, votes, scales)
        del excess
        directions = read_directions(kernels, segments, self.bucket, device=device)
        # In place: each of these has the size of the parameters.
        self._drafted = [
            (residual, directions[index].view_as(residual).sub_(after[index]))
            for index, residual in enumerate(residuals)
            if present[index]
        ]
        return self._join_votes(votes, scales), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        bucket = self.bucket
        packed, scales = self._split_votes(votes)
        n_elements = packed.shape[1] * BLOCK_WORDS * WORD_ELEMENTS
        nothing = torch.zeros(1, n_elements, dtype=torch.float32, device=votes.device)
        total, step = torch.zeros_like(nothing), torch.empty_like(nothing)
        said = BlockVotes(packed, present, bucket, first_shard * bucket.shard_blocks)
        for worker, weight in enumerate(self.roster.weights):
            own = slice(worker, worker + 1)
            one = said._replace(packed=packed[own], present=present[own])
            kernels.add_steps_of_all(nothing, one, scales[own], out=step)
            total += step if weight == 1 else step * weight
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        anybody, summed = present.any(0, keepdim=True), as_votes(total, packed.shape[1])
        self.rule.count(kernels, said._replace(packed=summed, present=anybody), coins, out=out)
        shards = range(first_shard, first_shard + self._count_shards(votes))
        n_votes = self.count_present(present).tolist()
        return self._join_reply(out, self._measure(total.view(-1), n_votes, shards))

    def note(self) -> None:
        for residual, after in self._drafted:
            residual.copy_(after)
        self._drafted = ()

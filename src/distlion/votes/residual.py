"""One or two bits up, one bit and a step length down; votes carry rounding errors forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.layout import BucketLayout
from distlion.votes.bucket_vote import BucketVote, WorkerState
from distlion.votes.feedback import FeedbackVote
from distlion.votes.roster import Roster

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

    n_reply_scales = 1

    worker_state: ClassVar[tuple[str, ...]] = (_RESIDUAL,)

    bits: int = 1

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return _ResidualBucket(self, bucket, roster)


class _ResidualBucket(BucketVote):
    """The vote on one bucket, with the last vote; residuals are in the optimizer's state."""

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        residuals, votes = [state[_RESIDUAL] for state in kept], self._make_votes(device)
        scales = torch.zeros(
            len(self.bucket.slots), self.rule.n_scales, dtype=torch.float32, device=device
        )
        found = scales[: len(segments)]
        finite = kernels.encode_rests(
            segments, residuals, coins.zero, out=votes, scales=found, are_residuals=True
        )
        encoded = (segments, residuals, votes, found, finite)
        self._move_own = partial(kernels.move_residuals, *encoded)
        return self._join_votes(votes, scales), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        packed, scales = self._split_votes(votes)
        return self._count_steps(
            kernels,
            BlockVotes(packed, present, self.bucket, first_shard * self.bucket.shard_blocks),
            scales,
            coins,
            estimates=None,
            n_votes=self.count_present(present).tolist(),
            shards=range(first_shard, first_shard + self._count_shards(votes)),
        )

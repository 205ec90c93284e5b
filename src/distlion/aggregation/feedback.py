"""One or two bits up, one bit down: votes on what the others do not know of a direction yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.aggregation.base import Aggregation
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels import (
    Coins,
    Kernels,
    ReplyFormat,
    Segment,
    VoteFormat,
    count_estimates,
)
from distlion.layout import Bucket

MOST_BITS = 2


@dataclass(frozen=True)
class FeedbackVote(Aggregation):
    """Move every element with the sign of what all votes have said so far, by error feedback.

    Equation:
        d_i = c_i - h_i,  c_i = beta1 * m_i + (1 - beta1) * g_i
        q_i = sign(d_i) * a_i;  h_i <- h_i + q_i;  S = sign(sum_i h_i)
        one bit:  a_i = mean |d_i| over the parameter
        two bits: the second one says whether |d_i| is at least that mean; a_i is the mean |d_i| of
                  the elements of which it says the same
        (EF21, arXiv:2106.05203, with scaled signs for its compressor, on Lion's directions)

    The estimate h_i is what worker i's votes have said of its direction. It follows the direction
    step by step, so that the sum of all estimates follows that of global Lion, also where workers
    see different data, on which a majority vote stops learning.

    Args:
        bits: 1 or 2. Two were on a par with a majority vote on evenly shared data too.

    Raises:
        InvalidArgumentError: ``bits`` is out of range.
        UnsupportedTypeError: ``bits`` is not an integer.

    Notes:
        A vote carries ``bits`` float32 scales for each parameter; with ``nodes``, and of sharded
        parameters, for each piece. Every worker keeps its estimate beside its momentum, in float32
        and in ``state[param]["estimate"]``. Who counts keeps those of all workers for what it
        counts: with ``AllReduce`` as many elements again, with ``AllGather`` and on the server of
        ``ParameterServer`` N times as many; that copy is exchanged anew, in 32 bits, when a
        state is loaded. What a worker that abstains has said before still counts. An element whose
        d_i is exactly 0 says plus or minus by its worker's coin, a sum of exactly 0 by everybody's.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise UnsupportedTypeError(f"FeedbackVote(bits={self.bits!r}): expected an integer")
        if not 1 <= self.bits <= MOST_BITS:
            raise InvalidArgumentError(f"FeedbackVote(bits={self.bits}): expected 1 or {MOST_BITS}")

    @property
    def vote_planes(self) -> int:
        return self.bits

    def reply_planes(self, n_workers: int) -> int:
        return 1

    @property
    def vote_format(self) -> VoteFormat:
        return VoteFormat.STEP

    @property
    def reply_format(self) -> ReplyFormat:
        return ReplyFormat.SIGN

    @property
    def n_scales(self) -> int:
        return self.bits

    @property
    def keeps_estimates(self) -> bool:
        return True

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write the bits of a first vote, before which all estimates are 0, without its scales."""
        scales = torch.empty(len(segments), self.n_scales, device=out.device)
        nothing = say_nothing(segments)
        return self.encode_rests(kernels, segments, nothing, coins, out=out, scales=scales)

    def encode_rests(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        estimates: Sequence[Tensor],
        coins: Coins,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        """Write a vote on what estimates lack of directions: bits and scales, as the op says."""
        return kernels.encode_rests(segments, estimates, coins.zero, out=out, scales=scales)

    def count(
        self,
        kernels: Kernels,
        votes: Tensor,
        present: Tensor,
        bucket: Bucket,
        first_block: int,
        coins: Coins,
        *,
        out: Tensor,
    ) -> None:
        """Write the reply to estimates after a vote.

        ``votes`` are 32 planes of float32 values: the estimates of all workers, or their sum in
        rank order as that of one.
        """
        count_estimates(kernels, votes, present, bucket, first_block, coins.tie, out=out)


def say_nothing(segments: Sequence[Segment]) -> list[Tensor]:
    """Return the estimates before any vote: zeros."""
    return [torch.zeros_like(segment.param, dtype=torch.float32) for segment in segments]

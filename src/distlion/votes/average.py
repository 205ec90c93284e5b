"""One bit up, the number of +1 votes down: the mean of the signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.votes.aggregation import Aggregation


@dataclass(frozen=True)
class Average(Aggregation):
    """Move every element by the mean of the workers' signs.

    Equation:
        Delta = (1 / n) sum_i sign(c_i) = (2 * count - n) / n
        count: +1 votes; n: all votes on the parameter, carried in the reply
        (Distributed Lion, arXiv:2404.00438, Algorithm 1, Avg)

    Notes:
        ceil(log2(N + 1)) bits down, N the sum of all weights. A direction that is exactly 0 takes
        the coin of its worker.
    """

    vote_planes = 1
    vote_format = VoteFormat.LEVEL
    reply_format = ReplyFormat.COUNT

    def reply_planes(self, n_votes: int) -> int:
        return n_votes.bit_length()

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_signs(segments, coins.zero, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_ones(votes, out=out)

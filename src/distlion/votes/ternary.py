"""Two bits up, two bits down: exactly the papers' formula, including zeros."""

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
class TernaryVote(Aggregation):
    """Move every element with the sign of the sum of votes in {-1, 0, 1}.

    Equation:
        S = sign(sum_i sign(c_i)), sign(0) = 0
        (Distributed Lion, arXiv:2404.00438, Algorithm 1, MaVo)

    Notes:
        Elements that no worker touches (rows of an embedding, masked weights) stay where they
        are.
    """

    vote_planes = 2
    vote_format = VoteFormat.TERNARY
    reply_format = ReplyFormat.TERNARY

    def reply_planes(self, n_votes: int) -> int:
        return 2

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_ternary(segments, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_ternary(votes, out=out)

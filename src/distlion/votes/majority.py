"""One bit up, one bit down: the sign of the sum of signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.votes.aggregation import Aggregation


@dataclass(frozen=True)
class MajorityVote(Aggregation):
    """Move every element with the majority of the workers' signs.

    Equation:
        vote_i = sign(c_i), c_i = beta1 * m_i + (1 - beta1) * g_i
        S = sign(sum_i vote_i), over the workers present for the parameter
        (Distributed Lion, arXiv:2404.00438, Algorithm 1, MaVo)

    Args:
        tie: "random" breaks ties at random, without bias and equally on all workers: 1 bit down.
            "zero" leaves the element to weight decay alone: 2 bits down.

    Raises:
        InvalidArgumentError: ``tie`` is something else.

    Notes:
        A direction that is exactly 0 votes by its worker's coin. Both coins are inverted at odd
        steps.
    """

    vote_planes = 1
    vote_format = VoteFormat.LEVEL

    tie: Literal["random", "zero"] = "random"

    def __post_init__(self) -> None:
        if self.tie not in ("random", "zero"):
            raise InvalidArgumentError(
                f"MajorityVote(tie={self.tie!r}): expected 'random' or 'zero'"
            )

    def reply_planes(self, n_votes: int) -> int:
        return 1 if self.tie == "random" else 2

    @property
    def reply_format(self) -> ReplyFormat:
        return ReplyFormat.SIGN if self.tie == "random" else ReplyFormat.TERNARY

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_signs(segments, coins.zero, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        tie = coins.tie if self.tie == "random" else None
        kernels.count_signs(votes, tie, out=out)

"""Two bits up, two bits or one down: a vote on directions, masked by a vote on gradients."""

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
class MaskedVote(Aggregation):
    """Move an element with the majority of directions if the majority of gradients agrees.

    Equation:
        C = sum_i sign(c_i), G = sum_i sign(g_i), over the workers present for the parameter
        S = sign(C) where C * G > 0, else 0
        c_i = beta1 * m_i + (1 - beta1) * g_i, g_i the gradient of worker i
        (the mask of Cautious Optimizers, arXiv:2411.16085, applied to majorities)

    Args:
        tie: What an element does whose two majorities differ, or where one of them is a tie. "zero"
            leaves it to weight decay alone: 2 bits down. "random" moves it at random, without bias
            and equally on all workers: 1 bit down.

    Raises:
        InvalidArgumentError: ``tie`` is something else.

    Notes:
        For many workers with small batches, whose own gradients are too noisy for the mask of
        ``cautious=True``. That mask is another one; both can be used together.

        A sign of exactly 0 takes a coin of the worker, one for directions and another for
        gradients. Both are inverted at odd steps, so an element that no worker touches is back in
        place after every second step. A single worker takes Lion's step.
    """

    vote_planes = 2
    vote_format = VoteFormat.PAIR

    tie: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        if self.tie not in ("zero", "random"):
            raise InvalidArgumentError(f"MaskedVote(tie={self.tie!r}): expected 'zero' or 'random'")

    def reply_planes(self, n_votes: int) -> int:
        return 1 if self.tie == "random" else 2

    @property
    def reply_format(self) -> ReplyFormat:
        return ReplyFormat.SIGN if self.tie == "random" else ReplyFormat.TERNARY

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_pairs(segments, coins.zero, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        tie = coins.tie if self.tie == "random" else None
        kernels.count_pairs(votes, tie, out=out)

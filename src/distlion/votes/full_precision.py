"""Uncompressed directions up, two bits down: global Lion, which the other rules approximate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.votes.aggregation import Aggregation

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class FullPrecision(Aggregation):
    """Move every element with the sign of the mean direction.

    Equation:
        S = sign(sum_i c_i), sign(0) = 0, added in float32 in rank order
        c_i is linear in m_i and g_i, so this is Lion on the mean gradient (Lion Cub,
        arXiv:2411.16462), although no momentum is exchanged

    Args:
        dtype: Dtype of the directions that are sent: torch.float32 or torch.bfloat16.

    Raises:
        InvalidArgumentError: ``dtype`` is neither.
    """

    vote_format = VoteFormat.DIRECTION
    reply_format = ReplyFormat.TERNARY

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"FullPrecision(dtype={self.dtype}): expected torch.float32 or torch.bfloat16"
            )

    @property
    def vote_planes(self) -> int:
        return 8 * self.dtype.itemsize

    def reply_planes(self, n_votes: int) -> int:
        return 2

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_directions(segments, dtype=self.dtype, out=out)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.sum_directions(votes, dtype=self.dtype, out=out)

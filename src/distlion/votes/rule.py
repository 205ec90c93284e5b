"""The interface of a rule that the vote on a bucket uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import Kernels, ReplyFormat, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.tally import VoteFormat
from distlion.layout import Bucket, BucketShape


class Rule(Protocol):
    """The part of ``aggregation.Aggregation`` that a bucket calls; described there."""

    @property
    def vote_planes(self) -> int: ...

    def reply_planes(self, n_votes: int) -> int: ...

    @property
    def vote_format(self) -> VoteFormat: ...

    @property
    def reply_format(self) -> ReplyFormat: ...

    @property
    def n_scales(self) -> int: ...

    @property
    def worker_state(self) -> Sequence[str]: ...

    def shape(self, bucket: Bucket, n_votes: int) -> BucketShape: ...

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor: ...

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None: ...

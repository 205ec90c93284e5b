"""The interface of all rules: encode a worker's direction as a vote, and count votes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.layout import BucketLayout, BucketShape, bucket_of_one
from distlion.votes.bucket_vote import BucketVote
from distlion.votes.roster import Roster


class Aggregation(ABC):
    """A rule: the encoding of votes, their count and the reply.

    Rules are frozen dataclasses; a rule's ``repr`` rebuilds it. Tensors are packed as in
    ``distlion.layout``, (blocks, planes, 8) int64. A rule with state names a worker's tensors in
    ``worker_state``; ``start`` returns an object that keeps them for one bucket.
    """

    worker_state: ClassVar[tuple[str, ...]] = ()
    """Keys of the extra per-parameter tensors that each worker keeps in the optimizer's state."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        taken = sorted({"exp_avg", "step"} & set(cls.worker_state))
        if taken:
            raise InvalidArgumentError(
                f"{cls.__name__}.worker_state names {', '.join(taken)}, which is the optimizer's "
                "own; use another name"
            )

    @property
    @abstractmethod
    def vote_planes(self) -> int:
        """Bits per element of a vote."""

    @abstractmethod
    def reply_planes(self, n_votes: int) -> int:
        """Bits per element of a reply to ``n_votes`` votes at most."""

    @property
    @abstractmethod
    def vote_format(self) -> VoteFormat:
        """The format in which a vote encodes a direction."""

    @property
    @abstractmethod
    def reply_format(self) -> ReplyFormat:
        """The format in which a reply encodes S."""

    @property
    def n_scales(self) -> int:
        """Number of scales per parameter that a vote carries after its bits."""
        return 0

    @property
    def n_reply_scales(self) -> int:
        """Number of step lengths per parameter and shard that a reply carries, 0 or 1."""
        return 0

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        """Create the vote on one bucket, including any state that the rule keeps for it."""
        return BucketVote(self, bucket, roster)

    def shape(self, bucket: BucketLayout, n_votes: int) -> BucketShape:
        """Size a bucket's votes and replies on the wire, for ``n_votes`` votes on an element."""
        return bucket.shape(
            vote_planes=self.vote_planes,
            reply_planes=self.reply_planes(n_votes),
            has_counts=self.reply_format is ReplyFormat.COUNT,
            has_partial_sums=self.vote_format.has_partial_sums,
            n_scales=self.n_scales,
            n_reply_scales=self.n_reply_scales,
        )

    def shape_of(self, n_elements: int, n_voters: int) -> BucketShape:
        """Size a bucket of one parameter of ``n_elements``, as it would travel."""
        return self.shape(bucket_of_one(n_elements, n_voters), n_voters)

    @abstractmethod
    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write this worker's vote on one bucket; reads only.

        Args:
            kernels: The arithmetic.
            segments: The bucket's parameters, in order.
            coins: This worker's coins of this step.
            out: (blocks, vote_planes, 8) int64. Overwritten.

        Returns:
            (n_params,) bool on the device of ``out``: whether gradient, direction and new momentum
            are finite; not yet read by the host.
        """

    @abstractmethod
    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        """Write the reply to the votes on some blocks of a bucket.

        Args:
            kernels: The arithmetic.
            votes: The votes, of ``vote_planes`` planes.
            coins: The coins of this step; only those that are equal on all workers are used.
            out: (blocks, reply_planes, 8) int64. Overwritten.
        """

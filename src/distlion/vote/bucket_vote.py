"""The vote on one bucket: how a worker encodes, how votes are counted, how a reply is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.kernels import FLOAT_PLANES, BlockVotes, Coin, Coins, Kernels, Segment
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket, BucketShape
from distlion.vote.reply import ParameterReply
from distlion.vote.roster import Roster
from distlion.vote.rule import Rule
from distlion.vote.tally import RuleTally

WorkerState = Mapping[str, Tensor]
"""A worker's extra tensors for one parameter, float32, keyed by ``Rule.worker_state``."""


class BucketVote:
    """The vote on one bucket, without a network: encode, count, commit.

    This class serves every rule without state. A rule with state returns a subclass from ``start``,
    which drafts a step beside what is kept: ``encode`` and ``count`` only read, and ``note`` takes
    over what the last of each has come to. What is drafted leaves out every parameter that has no
    gradient, or is not finite: there the worker abstains.

    Args:
        rule: How the bucket is voted on.
        bucket: Where its parameters lie.
        roster: Who votes.

    Attributes:
        shape: Sizes on the wire.
        vote_planes, reply_planes: Bits an element of a vote, and of a reply.
        reply_format: How a reply writes S.
        is_weighted: Whether some vote counts more than once.
    """

    def __init__(self, rule: Rule, bucket: Bucket, roster: Roster) -> None:
        self.rule, self.bucket, self.roster = rule, bucket, roster
        self.shape = rule.shape(bucket, roster.n_votes)
        self.vote_planes = rule.vote_planes
        self.reply_planes = rule.reply_planes(roster.n_votes)
        self.reply_format = rule.reply_format
        self.is_weighted = roster.is_weighted

    def encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Encode a worker's vote.

        Args:
            kernels: The arithmetic on ``device``.
            segments: The bucket's parameters, in order, without gradient where the worker abstains;
                none where it cannot vote.
            kept: For each segment what the worker keeps of it; empty for a rule without state.
            coins: The worker's, of this step.
            device: Where the vote is written.

        Returns:
            (n_shards, vote_bytes) uint8, and for each segment whether gradient, direction and new
            momentum are finite, (n,) bool. Both on ``device``.
        """
        votes = self._make_votes(device)
        finite = self.rule.encode(kernels, segments, coins, out=votes)
        return votes.view(-1).view(torch.uint8).view(self.bucket.n_shards, -1), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        """Count votes.

        Args:
            kernels: The arithmetic where ``votes`` are.
            votes: (voters, n_shards * vote_bytes) uint8, of some shards that follow each other; a
                row for each voter, in the order of the roster.
            present: (voters, n_params) bool on the CPU: who votes for which parameter.
            first_shard: The shard that ``votes`` begin with.
            coins: Of this step; only those that are equal on all workers are used.

        Returns:
            (n_shards * reply_bytes,) uint8.
        """
        if self.is_weighted:
            present = self.roster.weigh(present)
        packed = votes.contiguous().view(torch.int64)
        packed = packed.view(len(votes), -1, self.vote_planes, BLOCK_WORDS)
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        first_block = first_shard * self.bucket.shard_blocks
        cast = BlockVotes(packed, present, self.bucket, first_block)
        self.rule.count(kernels, cast, coins, out=out)
        return out.view(-1).view(torch.uint8)

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Return how many votes each parameter gets, (n_params,) int64, as ``apply`` wants them.

        Arguments are those of ``Roster.weigh``.
        """
        return self.roster.weigh(present, rows).sum(0)

    def read_reply(self, payload: Tensor) -> Tensor:
        """Read a reply's bytes, and perhaps padding after them: (blocks, planes, 8) int64."""
        row = payload.reshape(-1)[: self.shape.n_shards * self.shape.reply_bytes]
        return row.view(torch.int64).view(-1, self.reply_planes, BLOCK_WORDS)

    def list_replies(
        self, payload: Tensor, present: Sequence[int], positions: Sequence[int]
    ) -> list[ParameterReply]:
        """List the replies on the bucket's parameters.

        Args:
            payload: As for ``read_reply``.
            present: How many voted for each parameter.
            positions: The number of each parameter among the trainable ones.
        """
        packed = self.read_reply(payload)
        return [
            ParameterReply(positions[index], slot, packed, self.reply_format, present[index])
            for index, slot in enumerate(self.bucket.slots)
        ]

    def commit(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        present: Sequence[int],
        payload: Tensor,
        rounding: Coin | None,
    ) -> None:
        """Apply a reply's bytes, and move momenta and what is kept.

        Args:
            kernels: The arithmetic where the parameters are.
            segments: The bucket's parameters, in order.
            present: How many voted for each; where the rule does not need it, whether any did.
            payload: As for ``read_reply``, where the parameters are.
            rounding: The coin of stochastic rounding; None to round to nearest.
        """
        reply = self.read_reply(payload)
        kernels.commit(segments, present, reply, reply_format=self.reply_format, rounding=rounding)
        self.note()

    def apply(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        present: Sequence[int],
        payload: Tensor,
        rounding: Coin | None,
    ) -> None:
        """Apply a reply's bytes, as ``commit``, to parameters whose momenta are elsewhere."""
        reply = self.read_reply(payload)
        kernels.apply_reply(
            segments, present, reply, reply_format=self.reply_format, rounding=rounding
        )

    def note(self) -> None:
        """Make the drafted state current, because the step was committed."""

    def tell(self, kept: Sequence[WorkerState]) -> Tensor:
        """Return what a counter must know of a worker that has voted before it counted.

        Returns:
            (n_shards, told_shape.vote_bytes) uint8 on the CPU: of each shard the values of every
            name in ``Rule.worker_state``, 0 where the bucket has no parameter.
        """
        bucket, names = self.bucket, self.rule.worker_state
        shard_elements = bucket.shard_blocks * BLOCK_WORDS * WORD_ELEMENTS
        values = torch.zeros(len(names), bucket.n_shards * shard_elements)
        for slot, state in zip(bucket.slots, kept, strict=True):
            start = slot.bucket_word * WORD_ELEMENTS
            for row, name in enumerate(names):
                values[row, start : start + slot.n_elements] = state[name].view(-1)
        shards = values.view(len(names), bucket.n_shards, shard_elements).transpose(0, 1)
        return shards.reshape(bucket.n_shards, len(names) * shard_elements).view(torch.uint8)

    @property
    def told_shape(self) -> BucketShape:
        """Sizes of what ``tell`` returns, as those of a vote."""
        planes = FLOAT_PLANES * len(self.rule.worker_state)
        return self.bucket.shape(
            vote_planes=planes, reply_planes=1, has_counts=False, has_tally=False
        )

    def hear(self, told: Tensor) -> None:
        """Begin to count anew, with what all workers tell.

        Args:
            told: (voters, n_shards * told_bytes) uint8, of the shards that are counted here.
        """

    def _make_votes(self, device: torch.device) -> Tensor:
        shape = self.bucket.n_blocks, self.vote_planes, BLOCK_WORDS
        return torch.empty(shape, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class BucketCount:
    """A bucket as a pattern sees it: bytes of votes in, bytes of a reply out.

    Attributes:
        vote: The bucket.
        kernels: The arithmetic where votes are.
        coins: Of this step.
    """

    vote: BucketVote
    kernels: Kernels
    coins: Coins

    @property
    def parts(self) -> RuleTally | None:
        """How to count in parts; None for rules that cannot."""
        vote = self.vote
        if vote.shape.tally_bytes is None:
            return None
        roster = vote.roster
        return RuleTally(vote.rule, vote.bucket, self.coins, roster.n_votes, roster)

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Count who votes; arguments are those of ``BucketVote.count_present``."""
        if not self.vote.is_weighted:
            return present.sum(0)
        return self.vote.count_present(present, rows)

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        """Count votes; arguments are those of ``BucketVote.count``."""
        return self.vote.count(self.kernels, votes, present, first_shard, self.coins)


def make_worker_state(rule: Rule, param: Tensor) -> dict[str, Tensor]:
    """Return what a worker keeps of a parameter before its first vote: zeros."""
    return {name: torch.zeros_like(param, dtype=torch.float32) for name in rule.worker_state}

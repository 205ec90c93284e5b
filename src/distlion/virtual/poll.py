"""One bucket of a virtual step: votes come in, one worker after the other, and are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.aggregation import Aggregation
from distlion.kernels import Coins, Kernels, choose_kernels
from distlion.layout import BLOCK_WORDS, Bucket
from distlion.voting import ParameterReply, VotingParam


@dataclass
class Poll:
    """The votes on one bucket.

    Attributes:
        bucket, params: Where the parameters lie, and their records.
        rule, kernels: How they are voted on, and by which arithmetic.
        votes: (workers, n_blocks, planes, 8) int64.
        present: (workers, n_params) bool on the CPU.
    """

    bucket: Bucket
    params: tuple[VotingParam, ...]
    rule: Aggregation
    kernels: Kernels
    votes: Tensor
    present: Tensor

    @classmethod
    def open(cls, bucket: Bucket, params: Sequence[VotingParam], *, workers: int) -> Poll:
        """Open a poll without votes; ``params`` are all trainable ones."""
        members = tuple(
            params[position].at(bucket.slots[index])
            for index, position in enumerate(bucket.members)
        )
        rule, _, device = members[0].kind
        shape = (workers, bucket.n_blocks, rule.vote_planes, BLOCK_WORDS)
        votes = torch.zeros(shape, dtype=torch.int64, device=device)
        present = torch.zeros(workers, len(members), dtype=torch.bool)
        return cls(bucket, members, rule, choose_kernels(device), votes, present)

    def count(self, coins: Coins) -> Tensor:
        """Return the reply, (n_blocks, reply_planes, 8) int64."""
        planes = self.rule.reply_planes(len(self.votes))
        out = self.votes.new_empty(self.bucket.n_blocks, planes, BLOCK_WORDS)
        self.rule.count(self.kernels, self.votes, self.present, self.bucket, 0, coins, out=out)
        return out

    def list_replies(self, reply: Tensor, present: Sequence[int]) -> list[ParameterReply]:
        """List the replies, one for each parameter."""
        return [
            ParameterReply(
                param.position, param.slot, reply, self.rule.reply_format, present[index]
            )
            for index, param in enumerate(self.params)
        ]

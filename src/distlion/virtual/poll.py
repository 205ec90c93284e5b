"""One bucket of a virtual step: votes come in, one worker after the other, and are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distlion.aggregation import Aggregation, FeedbackVote
from distlion.kernels import FLOAT_PLANES, Coins, Kernels, Segment, choose_kernels
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket
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

    def encode(
        self, worker: int, segments: Sequence[Segment], coins: Coins
    ) -> tuple[Tensor, Callable[[Sequence[bool]], None]]:
        """Encode a worker's vote.

        Returns:
            Whether segments are finite; and what notes, once it is known for which parameters the
            worker votes, that it has said so.
        """
        votes = self.votes[worker]
        if not isinstance(self.rule, FeedbackVote):
            finite = self.rule.encode(self.kernels, segments, coins, out=votes)
            return finite, partial(self._note, worker)
        estimates = [param.estimate[worker] for param in self.params]
        scales = torch.empty(len(segments), self.rule.n_scales, device=votes.device)
        finite = self.rule.encode_rests(
            self.kernels, segments, estimates, coins, out=votes, scales=scales
        )

        def note(present: Sequence[bool]) -> None:
            after = self.kernels.add_steps(estimates, self.bucket.slots, present, votes, scales)
            for estimate, added in zip(estimates, after, strict=True):
                estimate.copy_(added)
            self._note(worker, present)

        return finite, note

    def _note(self, worker: int, present: Sequence[bool]) -> None:
        self.present[worker] = torch.tensor(present, dtype=torch.bool)

    def count(self, coins: Coins) -> Tensor:
        """Return the reply, (n_blocks, reply_planes, 8) int64."""
        planes = self.rule.reply_planes(len(self.votes))
        out = self.votes.new_empty(self.bucket.n_blocks, planes, BLOCK_WORDS)
        counted = self._place_estimates() if self.rule.keeps_estimates else self.votes
        self.rule.count(self.kernels, counted, self.present, self.bucket, 0, coins, out=out)
        return out

    def _place_estimates(self) -> Tensor:
        """Put all workers' estimates where the bucket has their parameters: packed float32."""
        n_workers, n_blocks = len(self.votes), self.bucket.n_blocks
        n_elements = n_blocks * BLOCK_WORDS * WORD_ELEMENTS
        values = torch.zeros(n_workers, n_elements, device=self.votes.device)
        for slot, param in zip(self.bucket.slots, self.params, strict=True):
            start = slot.bucket_word * WORD_ELEMENTS
            values[:, start : start + slot.n_elements] = param.estimate.view(n_workers, -1)
        return values.view(torch.int64).view(n_workers, n_blocks, FLOAT_PLANES, BLOCK_WORDS)

    def list_replies(self, reply: Tensor, present: Sequence[int]) -> list[ParameterReply]:
        """List the replies, one for each parameter."""
        return [
            ParameterReply(
                param.position, param.slot, reply, self.rule.reply_format, present[index]
            )
            for index, param in enumerate(self.params)
        ]

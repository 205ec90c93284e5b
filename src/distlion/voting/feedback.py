"""What votes with error feedback have said so far: this worker's, and all that are counted here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlion.aggregation import FeedbackVote, say_nothing
from distlion.exchange import Ballot, Exchange, Exchanging, Header, Link, PartialReducer, Reply
from distlion.kernels import (
    FLOAT_PLANES,
    Coins,
    Kernels,
    Segment,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket, BucketShape
from distlion.voting.param import VotingParam


class Feedback:
    """The estimates of one bucket between two steps, and those that a step would leave.

    A step is drafted beside what is kept: ``encode`` and ``reduce`` only read, and ``commit`` takes
    over what the last of each has come to.

    Args:
        rule: How the bucket is voted on.
        bucket: Where its parameters lie.
        params: Those parameters, in order; their estimates are in the optimizer's state.
    """

    def __init__(self, rule: FeedbackVote, bucket: Bucket, params: Sequence[VotingParam]) -> None:
        self._rule, self._bucket, self._params = rule, bucket, params
        self._shape = rule.shape(bucket)
        self._drafted: Sequence[Tensor] = ()
        # (workers, elements counted here) float32; None before the first exchange.
        self._everybody: Tensor | None = None
        self._note_votes: Callable[[], None] | None = None

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Encode this worker's vote, or that of a worker without any segment.

        Returns:
            (n_shards, vote_bytes) uint8: for each shard its bits and all scales; and whether
            segments are finite. On ``device``.
        """
        rule, bucket = self._rule, self._bucket
        estimates = self._find_estimates(segments)
        votes = torch.empty(
            bucket.n_blocks, rule.vote_planes, BLOCK_WORDS, dtype=torch.int64, device=device
        )
        scales = torch.zeros(len(bucket.slots), rule.n_scales, device=device)
        finite = rule.encode_rests(
            kernels, segments, estimates, coins, out=votes, scales=scales[: len(segments)]
        )
        present = [segment.grad is not None for segment in segments]
        self._drafted = kernels.add_steps(estimates, bucket.slots, present, votes, scales)
        return self._join(votes, scales), finite

    def reduce(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        """Count votes, as a pattern's ``Reducer``."""
        rule, bucket = self._rule, self._bucket
        first_block = first_shard * bucket.shard_blocks
        packed, scales = self._split(votes)
        n_elements = packed.shape[1] * BLOCK_WORDS * WORD_ELEMENTS
        if self._everybody is None:
            self._everybody = torch.zeros(len(votes), n_elements)
        estimates, total = self._everybody, torch.zeros(1, n_elements)
        after = torch.empty_like(total)
        for worker in range(len(votes)):  # one at a time, since estimates change in commit only
            own = slice(worker, worker + 1)
            said = (packed[own], scales[own], present[own], bucket, first_block)
            kernels.add_steps_of_all(estimates[own], *said, out=after)
            total += after

        def note_votes() -> None:
            kernels.add_steps_of_all(
                estimates, packed, scales, present, bucket, first_block, out=estimates
            )

        self._note_votes = note_votes
        out = packed.new_empty(packed.shape[1], rule.reply_planes(len(votes)), BLOCK_WORDS)
        rule.count(
            kernels,
            _as_votes(total, packed.shape[1]),
            present.any(0, keepdim=True),
            bucket,
            first_block,
            coins,
            out=out,
        )
        return out.view(-1).view(torch.uint8)

    def commit(self) -> None:
        """Take over what the vote of this step has said."""
        for param, after in zip(self._params, self._drafted, strict=False):
            if after is not param.estimate:
                param.estimate.copy_(after)
        if self._note_votes is not None:
            self._note_votes()
        # Until the next step they would hold a copy of the estimates, and everybody's votes.
        self._drafted, self._note_votes = (), None

    def gather(self, link: Link, pattern: Exchange, header: Header) -> Exchanging[Reply]:
        """Send this worker's estimates to whom they are counted by; every worker must call it.

        Needed where estimates are not those that earlier votes over the same link have led to: once
        a state was loaded, parameters were placed anew, or replicas repaired.
        """
        bucket = self._bucket
        values = torch.zeros(bucket.n_blocks * BLOCK_WORDS * WORD_ELEMENTS)
        for slot, param in zip(bucket.slots, self._params, strict=True):
            start = slot.bucket_word * WORD_ELEMENTS
            values[start : start + slot.n_elements] = param.estimate.view(-1)
        shape = bucket.shape(
            vote_planes=FLOAT_PLANES, reply_planes=1, has_counts=False, has_tally=False
        )
        ballot = Ballot(
            replace(header, bucket=bucket.index, sender=link.rank),
            values.view(torch.uint8).view(bucket.n_shards, -1),
            torch.ones(len(bucket.slots), dtype=torch.bool),
        )
        return (yield from pattern.exchange(link, shape, ballot, _Keeper(self, shape)))

    def keep(self, everybody: Tensor) -> None:
        """Keep all workers' estimates of what is counted here: (workers, elements) float32."""
        self._everybody = everybody

    def _find_estimates(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Return the estimates of segments; scratch ones are of no parameter with a state."""
        if len(segments) == len(self._params):
            return [param.estimate for param in self._params]
        return say_nothing(segments)

    def _join(self, votes: Tensor, scales: Tensor) -> Tensor:
        shape = self._shape
        row = torch.zeros(shape.scales_bytes, dtype=torch.uint8, device=votes.device)
        found = scales.view(-1).view(torch.uint8)
        row[: found.numel()] = found
        bits = votes.view(-1).view(torch.uint8).view(shape.n_shards, -1)
        return torch.cat([bits, row.expand(shape.n_shards, -1)], dim=1)

    def _split(self, votes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bits, (workers, blocks, planes, 8), and the scales, (workers, n_params, p)."""
        shape, rule, n_params = self._shape, self._rule, len(self._bucket.slots)
        rows = votes.view(len(votes), -1, shape.vote_bytes)
        n_bytes = shape.vote_bytes - shape.scales_bytes
        bits = rows[:, :, :n_bytes].contiguous().view(torch.int64)
        scales = rows[:, 0, n_bytes:].contiguous().view(torch.float32)
        return (
            bits.view(len(votes), -1, rule.vote_planes, BLOCK_WORDS),
            scales[:, : n_params * rule.n_scales].view(len(votes), n_params, rule.n_scales),
        )


@dataclass(frozen=True)
class _Keeper:
    """Keeps what a pattern brings to be counted, and replies zeros."""

    feedback: Feedback
    shape: BucketShape

    @property
    def parts(self) -> PartialReducer | None:
        return None

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        values = votes.contiguous().view(torch.float32).clone()
        self.feedback.keep(values)
        n_shards = votes.shape[1] // self.shape.vote_bytes
        return torch.zeros(n_shards * self.shape.reply_bytes, dtype=torch.uint8)


def _as_votes(estimates: Tensor, n_blocks: int) -> Tensor:
    """View (workers, 512 blocks) float32 as packed, (workers, blocks, 32, 8) int64."""
    words = estimates.view(-1).view(torch.int64)
    return words.view(len(estimates), n_blocks, FLOAT_PLANES, BLOCK_WORDS)

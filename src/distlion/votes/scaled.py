"""Majority votes on deltas: one bit up, one bit and a step length down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import FLOAT32_MAX, ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.layout import BLOCK_WORDS, FLOAT_BYTES, WORD_ELEMENTS, BucketLayout, Slot
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import BucketVote, WorkerState
from distlion.votes.roster import Roster


class ScalingVote(BucketVote):
    """The vote on one bucket with scales at the end of votes, and of replies if the rule has them.

    Equation:
        x = x - lr * s * S, where the reply says s, a float32 for each parameter and shard

    A parameter in several shards has a scale in each: a shard's owner computes it from its own
    part, from bytes alone. Ops get it as the rate of a segment, which is cut where shards meet, so
    that ops do not need to know scales.
    """

    def commit(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        present: Sequence[int],
        payload: Tensor,
        rounding: Coin | None,
    ) -> None:
        if not self.shape.reply_scales_bytes:
            super().commit(kernels, segments, present, payload, rounding)
            return
        # First, as a residual depends on the direction, and that on the momentum.
        self.note()
        self.apply(kernels, segments, present, payload, rounding)

    def apply(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        present: Sequence[int],
        payload: Tensor,
        rounding: Coin | None,
    ) -> None:
        if not self.shape.reply_scales_bytes:
            super().apply(kernels, segments, present, payload, rounding)
            return
        scales = self.read_scales(payload).tolist()
        pieces, voted = [], []
        for shard, cuts in enumerate(self.bucket.cuts):
            for index, slot in cuts:
                pieces.append(_take_piece(segments[index], slot, scales[shard][index]))
                voted.append(present[index])
        reply = self.read_reply(payload)
        kernels.commit(pieces, voted, reply, reply_format=self.reply_format, rounding=rounding)

    def read_reply(self, payload: Tensor) -> Tensor:
        if not self.shape.reply_scales_bytes:
            return super().read_reply(payload)
        bits, _ = self._split(self._as_row(payload), self.shape.reply_bytes, self._n_reply_tail)
        return bits.view(-1, self.reply_planes, BLOCK_WORDS)

    def read_scales(self, payload: Tensor) -> Tensor:
        """Read a reply's step lengths: (n_shards, n_params) float32, on the payload's device."""
        _, tail = self._split(self._as_row(payload), self.shape.reply_bytes, self._n_reply_tail)
        return tail[0, :, : len(self.bucket.slots)]

    def _as_row(self, payload: Tensor) -> Tensor:
        return payload.reshape(1, -1)[:, : self.shape.n_shards * self.shape.reply_bytes]

    @property
    def _n_reply_tail(self) -> int:
        return self.shape.reply_scales_bytes

    def _split(self, rows: Tensor, n_bytes: int, tail_bytes: int) -> tuple[Tensor, Tensor]:
        """Split rows of bytes, each of some shards, into their words and their scales.

        Returns:
            (rows, words) int64, and (rows, shards, scales) float32 with padding behind them.
        """
        shards = rows.view(len(rows), -1, n_bytes)
        # Flat: a bucket without elements has no bits, and no strides that could be divided by 8.
        bits = shards[:, :, : n_bytes - tail_bytes].contiguous().view(-1).view(torch.int64)
        tail = shards[:, :, n_bytes - tail_bytes :].contiguous()
        return bits.view(len(rows), -1), tail.view(torch.float32)

    def _split_votes(self, votes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bits, (workers, blocks, planes, 8), and the scales, (workers, n_params, p)."""
        shape, n_params, n_scales = self.shape, len(self.bucket.slots), self.rule.n_scales
        bits, tail = self._split(votes, shape.vote_bytes, shape.scales_bytes)
        scales = tail[:, 0, : n_params * n_scales].reshape(len(votes), n_params, n_scales)
        return bits.view(len(votes), -1, self.vote_planes, BLOCK_WORDS), scales

    def _join_votes(self, votes: Tensor, scales: Tensor) -> Tensor:
        """Append all scales to the bits of each shard: (n_shards, vote_bytes) uint8."""
        shape = self.shape
        row = torch.zeros(shape.scales_bytes, dtype=torch.uint8, device=votes.device)
        found = scales.contiguous().view(-1).view(torch.uint8)
        row[: found.numel()] = found
        bits = votes.view(-1).view(torch.uint8).view(shape.n_shards, -1)
        return torch.cat([bits, row.expand(shape.n_shards, -1)], dim=1)

    def _join_reply(self, reply: Tensor, scales: Tensor) -> Tensor:
        """Append the scales, (shards, n_params) float32, to the bits of each counted shard.

        Returns:
            (shards * reply_bytes,) uint8.
        """
        bits = reply.view(-1).view(torch.uint8).view(len(scales), -1)
        tail = scales.new_zeros(len(scales), self.shape.reply_scales_bytes // FLOAT_BYTES)
        tail[:, : scales.shape[1]] = scales
        return torch.cat([bits, tail.view(torch.uint8)], dim=1).view(-1)

    def _count_shards(self, votes: Tensor) -> int:
        """Return the number of shards in votes, (workers, n_shards * vote_bytes)."""
        return votes.shape[1] // self.shape.vote_bytes

    def _count_steps(
        self,
        kernels: Kernels,
        votes: BlockVotes,
        scales: Tensor,
        coins: Coins,
        *,
        estimates: Tensor | None,
        n_votes: Sequence[int],
        shards: range,
    ) -> Tensor:
        """Count scaled votes; return the reply's bytes.

        Equation:
            s = mean over the parameter's elements in the shard of |T| / n, T as in ``count_steps``

        Args:
            kernels: The arithmetic.
            votes: As for the op.
            scales: As for the op.
            coins: The coins of this step.
            estimates: As for the op.
            n_votes: n, for each parameter.
            shards: The shards that are counted here.
        """
        packed, n_params = votes.packed, len(self.bucket.slots)
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        sums = packed.new_empty(len(shards), n_params, dtype=torch.float64)
        weights = self.roster.weights
        kernels.count_steps(
            votes, scales, coins.tie, weights=weights, estimates=estimates, out=out, sums=sums
        )
        if not self.shape.reply_scales_bytes:
            return out.view(-1).view(torch.uint8)
        counts = [[1] * n_params for _ in shards]
        for row, shard in zip(counts, shards, strict=True):
            for index, slot in self.bucket.cuts[shard]:
                row[index] = slot.n_elements * max(1, n_votes[index])
        divisors = torch.tensor(counts, dtype=torch.float64, device="cpu")
        means = (sums / divisors.view_as(sums).to(sums.device, non_blocking=True)).float()
        # Sums of finite numbers may exceed the range of a float.
        torch.nan_to_num_(means, nan=FLOAT32_MAX, posinf=FLOAT32_MAX)
        return self._join_reply(out, means)


def _take_piece(segment: Segment, slot: Slot, scale: float) -> Segment:
    """Return a part of a segment, or all of it, with a scaled rate."""
    whole, param, grad, exp_avg, coefficients = segment
    coefficients = coefficients._replace(lr=coefficients.lr * scale)
    if slot.n_elements < whole.n_elements:
        start = (slot.first_word - whole.first_word) * WORD_ELEMENTS
        here = slice(start, start + slot.n_elements)
        param, exp_avg = param.view(-1)[here], exp_avg.view(-1)[here]
        grad = None if grad is None else grad.view(-1)[here]
    return Segment(slot, param, grad, exp_avg, coefficients)


@dataclass(frozen=True)
class ScaledVote(Aggregation):
    """Move every element of a delta by the majority's sign and the workers' mean magnitude.

    Equation:
        vote_i = sign(d_i), a_i = mean |d_i| over the parameter
        x = x - lr * s * S,  S = sign(sum_i vote_i),  s = mean_i a_i
        (signSGD with majority vote, arXiv:1810.05291, with the scale of scaled signs,
        arXiv:1901.09847, and without error feedback)

    Only ``LocalSteps`` takes this rule: the magnitude of its deltas matters.

    Notes:
        A vote carries one float32 for each parameter, a reply one for each parameter and shard.
        Both means are over the workers present. A d_i that is exactly 0 votes by its worker's coin;
        a common coin breaks ties.
    """

    vote_planes = 1
    vote_format = VoteFormat.STEP
    reply_format = ReplyFormat.SIGN
    n_scales = 1
    n_reply_scales = 1

    def reply_planes(self, n_votes: int) -> int:
        return 1

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return ScaledBucket(self, bucket, roster)

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write the bits of a vote, without its scales."""
        scales = torch.empty(len(segments), self.n_scales, dtype=torch.float32, device=out.device)
        return self.encode_scaled(kernels, segments, coins, out=out, scales=scales)

    def encode_scaled(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        coins: Coins,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        """Write the bits and the scales of a vote; arguments and flags as ``encode_rests``."""
        return kernels.encode_rests(segments, None, coins.zero, out=out, scales=scales)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_signs(votes, coins.tie, out=out)


class ScaledBucket(ScalingVote):
    """The vote on one bucket: signs are counted one by one; the reply has the mean scale."""

    rule: ScaledVote

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        votes = self._make_votes(device)
        scales = torch.zeros(len(self.bucket.slots), 1, dtype=torch.float32, device=device)
        finite = self.rule.encode_scaled(
            kernels, segments, coins, out=votes, scales=scales[: len(segments)]
        )
        return self._join_votes(votes, scales), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        rows = list(self.roster.counted_rows)
        packed, scales = self._split_votes(votes)
        first_block = first_shard * self.bucket.shard_blocks
        cast = BlockVotes(packed, self.roster.weigh(present), self.bucket, first_block)
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        self.rule.count(kernels, cast, coins, out=out)
        means = mean_scales(scales[rows, :, 0], present[rows])
        return self._join_reply(out, means.expand(self._count_shards(votes), -1))


def mean_scales(scales: Tensor, present: Tensor) -> Tensor:
    """Average the scales of the workers present, added in double in rank order.

    Args:
        scales: (votes, n_params) float32.
        present: (votes, n_params) bool on the CPU.

    Returns:
        (n_params,) float32; 0 where nobody is present.
    """
    total = torch.zeros(scales.shape[1], dtype=torch.float64, device=scales.device)
    here = present.to(scales.device)
    for row, is_present in zip(scales.double(), here, strict=True):
        total += row * is_present
    return (total / here.sum(0).clamp(min=1)).float()

"""Votes and replies with step lengths: float32 scales after their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import FLOAT32_MAX, Kernels, Segment
from distlion.kernels.feedback import tree_mean
from distlion.layout import BLOCK_WORDS, FLOAT_BYTES, WORD_ELEMENTS, Slot
from distlion.votes.bucket_vote import BucketVote


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
        self.apply(kernels, segments, present, payload, rounding)
        kernels.update_momentum(segments, present)
        self.note()

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
        for shard in range(self.shape.n_shards):
            for index, slot in self.cut(shard):
                pieces.append(_take_piece(segments[index], slot, scales[shard][index]))
                voted.append(present[index])
        reply = self.read_reply(payload)
        kernels.apply_reply(pieces, voted, reply, reply_format=self.reply_format, rounding=rounding)

    def cut(self, shard: int) -> Iterator[tuple[int, Slot]]:
        """Cut the parameters to one shard; yield the number of each one there, and its part."""
        n_words = self.bucket.shard_blocks * BLOCK_WORDS
        begin, end = shard * n_words, (shard + 1) * n_words
        for index, slot in enumerate(self.bucket.slots):
            first = max(begin, slot.bucket_word)
            last = min(end, slot.bucket_word + slot.n_words)
            if first < last:
                skipped = first - slot.bucket_word
                stop = min(slot.n_elements, (last - slot.bucket_word) * WORD_ELEMENTS)
                yield (
                    index,
                    slot._replace(
                        n_elements=stop - skipped * WORD_ELEMENTS,
                        first_word=slot.first_word + skipped,
                        bucket_word=first,
                    ),
                )

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

    def _measure(self, total: Tensor, n_votes: Sequence[int], shards: range) -> Tensor:
        """Return the step length in each shard, the mean size of the summed votes.

        Equation:
            s = mean over the parameter's elements in the shard of |sum_i q_i| / n

        Args:
            total: (512 blocks,) float32, the sum of all q of the shards that are counted here.
            n_votes: n, for each parameter.
            shards: The shards that are counted here.

        Returns:
            (shards, n_params) float32 on the device of ``total``; 0 for a parameter outside a
            shard.
        """
        before = shards.start * self.bucket.shard_blocks * BLOCK_WORDS * WORD_ELEMENTS
        scales = total.new_zeros(len(shards), len(self.bucket.slots))
        for row, shard in enumerate(shards):
            for index, slot in self.cut(shard):
                start = slot.bucket_word * WORD_ELEMENTS - before
                sizes = total[start : start + slot.n_elements].abs()
                scales[row, index] = tree_mean(sizes, slot.n_elements * max(1, n_votes[index]))
        # Sums of finite numbers may exceed the range of a float.
        return torch.nan_to_num_(scales, nan=FLOAT32_MAX, posinf=FLOAT32_MAX)


def _take_piece(segment: Segment, slot: Slot, scale: float) -> Segment:
    """Return a part of a segment with a scaled rate; momenta move elsewhere."""
    start = (slot.first_word - segment.slot.first_word) * WORD_ELEMENTS
    here = slice(start, start + slot.n_elements)
    coefficients = segment.coefficients
    return segment._replace(
        slot=slot,
        param=segment.param.view(-1)[here],
        grad=None,
        exp_avg=segment.exp_avg.view(-1)[here],
        coefficients=coefficients._replace(lr=coefficients.lr * scale),
    )

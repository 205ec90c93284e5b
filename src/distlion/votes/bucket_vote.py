"""The vote on one bucket: a worker encodes, votes are counted, and a reply is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import FLOAT32_MAX, FLOAT_PLANES, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.orthogonal import orthogonalize_directions
from distlion.kernels.reference import Kernels
from distlion.kernels.sums import add_sums, settle_sum, start_sum
from distlion.layout import (
    BLOCK_WORDS,
    FLOAT_BYTES,
    WORD_ELEMENTS,
    BucketLayout,
    BucketShape,
    Slot,
    count_sum_planes,
)
from distlion.votes.reply import ParameterReply
from distlion.votes.roster import Roster

if TYPE_CHECKING:
    from distlion.votes.aggregation import Aggregation

WorkerState = Mapping[str, Tensor]
"""A worker's extra tensors for one parameter, float32, keyed by ``Aggregation.worker_state``."""


class BucketVote:
    """The vote on one bucket, without a network: encode, count, commit.

    Equation:
        x = x - lr * s * S, where s is 1 unless the reply has scales

    This class serves every rule without state and scales; others return a subclass from ``start``.
    One with state drafts its new state: ``encode`` and ``count`` only read, and ``note`` makes
    their last drafts current. The draft leaves out every parameter that has no gradient, or is not
    finite, as the worker abstains there.

    Scales, float32, follow the bits of each shard of a vote, and of a reply. A reply has one for
    each parameter and shard: a shard's owner computes it from its own part, from bytes alone. Ops
    get it as the rate of a segment, which is cut where shards meet, so that ops do not need to know
    scales.

    Args:
        rule: The rule of the vote.
        bucket: The bucket.
        roster: The voters.

    Attributes:
        shape: Sizes on the wire.
        vote_planes, reply_planes: Bits per element of a vote, and of a reply.
        reply_format: The format in which a reply encodes S.
    """

    def __init__(self, rule: Aggregation, bucket: BucketLayout, roster: Roster) -> None:
        self.rule, self.bucket, self.roster = rule, bucket, roster
        self._is_weighted = roster.is_weighted
        self.shape = rule.shape(bucket, roster.n_votes)
        self.vote_planes = rule.vote_planes
        self.reply_planes = rule.reply_planes(roster.n_votes)
        self.reply_format = rule.reply_format
        # The drafts: of the worker that has encoded, and of the rank that has counted.
        self._move_own: Callable[[], None] | None = None
        self._move_counted: Callable[[], None] | None = None

    def encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Encode a worker's vote; directions of orthogonalized parameters are computed first.

        Args:
            kernels: The arithmetic on ``device``.
            segments: The bucket's parameters, in order, without gradient where the worker abstains;
                empty if it cannot vote.
            kept: For each segment the worker's state; empty for a rule without state.
            coins: The worker's coins in this step.
            device: Device of the vote.

        Returns:
            (n_shards, vote_bytes) uint8, and for each segment whether gradient, direction and new
            momentum are finite, (n,) bool. Both on ``device``.
        """
        for segment in segments:
            if segment.coefficients.orthogonalize:
                segments = orthogonalize_directions(kernels, segments)
                break
        return self._encode(kernels, segments, kept, coins, device=device)

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Encode the directions of segments; arguments and results as for ``encode``.

        A rule with state overrides this.
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
            present: (voters, n_params) bool on the CPU: the votes cast for each parameter.
            first_shard: The shard that ``votes`` begin with.
            coins: The coins of this step; only those that are equal on all workers are used.

        Returns:
            (n_shards * reply_bytes,) uint8.
        """
        packed = votes.contiguous().view(torch.int64)
        packed = packed.view(len(votes), -1, self.vote_planes, BLOCK_WORDS)
        out = packed.new_empty(packed.shape[1], self.reply_planes, BLOCK_WORDS)
        first_block = first_shard * self.bucket.shard_blocks
        weighed = self.roster.weigh(present) if self._is_weighted else present
        cast = BlockVotes(packed, weighed, self.bucket, first_block)
        self.rule.count(kernels, cast, coins, out=out)
        return out.view(-1).view(torch.uint8)

    def count_present(self, present: Tensor) -> Tensor:
        """Return the number of votes of each parameter for ``commit``, (n_params,) int64.

        Arguments are those of ``Roster.weigh``.
        """
        if not self._is_weighted:
            return present.sum(0)
        return self.roster.weigh(present).sum(0)

    def read_reply(self, payload: Tensor) -> Tensor:
        """Read the bits of a reply, without padding after them: (blocks, planes, 8) int64."""
        shape, tail_bytes = self.shape, self.shape.reply_scales_bytes
        row = payload.reshape(-1)[: shape.n_shards * shape.reply_bytes]
        if tail_bytes:
            row = row.view(shape.n_shards, -1)[:, :-tail_bytes].contiguous().view(-1)
        return row.view(torch.int64).view(-1, self.reply_planes, BLOCK_WORDS)

    def read_scales(self, payload: Tensor) -> Tensor:
        """Read a reply's step lengths: (n_shards, n_params) float32, on the payload's device."""
        shape = self.shape
        row = payload.reshape(-1)[: shape.n_shards * shape.reply_bytes]
        tail = (
            row.view(shape.n_shards, -1)[:, -shape.reply_scales_bytes :]
            .contiguous()
            .view(torch.float32)
        )
        return tail[:, : len(self.bucket.slots)]

    def list_replies(
        self, payload: Tensor, present: Sequence[int], positions: Sequence[int]
    ) -> list[ParameterReply]:
        """List the replies on the bucket's parameters.

        Args:
            payload: As for ``read_reply``.
            present: Number of votes for each parameter.
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
        """Apply a reply's bytes, and move momenta and the rule's state.

        Args:
            kernels: The arithmetic where the parameters are.
            segments: The bucket's parameters, in order.
            present: Number of votes for each; where the rule does not need it, whether there are
                any.
            payload: As for ``read_reply``, on the parameters' device.
            rounding: The coin of stochastic rounding; None to round to nearest.
        """
        if self.shape.reply_scales_bytes:
            # First, as a residual depends on the direction, and that on the momentum.
            self.note()
            self.apply(kernels, segments, present, payload, rounding)
            return
        self.apply(kernels, segments, present, payload, rounding)
        if not all(present):
            # Momenta of a worker that is left out move too where nobody else has a vote.
            kernels.update_momentum(segments, [not n_votes for n_votes in present])
        if self.rule.worker_state:
            self.note()

    def apply(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        present: Sequence[int],
        payload: Tensor,
        rounding: Coin | None,
    ) -> None:
        """Apply a reply's bytes, and move the momenta of segments with a gradient.

        Arguments are those of ``commit``. Momenta that are elsewhere need no more.
        """
        reply = self.read_reply(payload)
        if self.shape.reply_scales_bytes:
            scales = self.read_scales(payload).tolist()
            pieces, voted = [], []
            for shard, cuts in enumerate(self.bucket.cuts):
                for index, slot in cuts:
                    pieces.append(_take_piece(segments[index], slot, scales[shard][index]))
                    voted.append(present[index])
            segments, present = pieces, voted
        kernels.commit(segments, present, reply, reply_format=self.reply_format, rounding=rounding)

    def note(self) -> None:
        """Make the drafted state current, because the step was committed."""
        for move in (self._move_own, self._move_counted):
            if move is not None:
                move()
        # Otherwise they would hold gradients and all votes until the next step.
        self._move_own = self._move_counted = None

    def export_state(self, kept: Sequence[WorkerState]) -> Tensor:
        """Return a worker's state for a counter that has not counted its earlier votes.

        Returns:
            (n_shards, state_shape.vote_bytes) uint8 on the CPU: for each shard the values of every
            name in ``Aggregation.worker_state``, 0 where the bucket has no parameter.
        """
        bucket, names = self.bucket, self.rule.worker_state
        shard_elements = bucket.shard_blocks * BLOCK_WORDS * WORD_ELEMENTS
        values = torch.zeros(
            len(names), bucket.n_shards * shard_elements, dtype=torch.float32, device="cpu"
        )
        for slot, state in zip(bucket.slots, kept, strict=True):
            start = slot.bucket_word * WORD_ELEMENTS
            for row, name in enumerate(names):
                values[row, start : start + slot.n_elements] = state[name].view(-1)
        shards = values.view(len(names), bucket.n_shards, shard_elements).transpose(0, 1)
        return shards.reshape(bucket.n_shards, len(names) * shard_elements).view(torch.uint8)

    @property
    def state_shape(self) -> BucketShape:
        """Sizes of the result of ``export_state``, as if it were a vote."""
        planes = FLOAT_PLANES * len(self.rule.worker_state)
        return self.bucket.shape(
            vote_planes=planes, reply_planes=1, has_counts=False, has_partial_sums=False
        )

    def import_states(self, told: Tensor) -> None:
        """Begin to count anew, with all workers' state.

        Args:
            told: (voters, n_shards * told_bytes) uint8, for the shards that are counted here.
        """

    def _make_votes(self, device: torch.device) -> Tensor:
        shape = self.bucket.n_blocks, self.vote_planes, BLOCK_WORDS
        return torch.empty(shape, dtype=torch.int64, device=device)

    def _split_votes(self, votes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bits, (workers, blocks, planes, 8), and the scales, (workers, n_params, p)."""
        shape, n_params, n_scales = self.shape, len(self.bucket.slots), self.rule.n_scales
        shards = votes.view(len(votes), -1, shape.vote_bytes)
        bits_bytes = shape.vote_bytes - shape.scales_bytes
        # Flat: a bucket without elements has no bits, and no strides that could be divided by 8.
        bits = shards[:, :, :bits_bytes].contiguous().view(-1).view(torch.int64)
        tail = shards[:, 0, bits_bytes:].contiguous().view(torch.float32)
        scales = tail[:, : n_params * n_scales].reshape(len(votes), n_params, n_scales)
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


@dataclass(frozen=True)
class BucketCount:
    """A bucket as a pattern sees it: bytes of votes in, bytes of a reply out.

    Attributes:
        vote: The bucket.
        kernels: The arithmetic where votes are.
        coins: The coins of this step.
    """

    vote: BucketVote
    kernels: Kernels
    coins: Coins

    def count_present(self, present: Tensor) -> Tensor:
        """Count the votes of each parameter; arguments as for ``BucketVote.count_present``."""
        return self.vote.count_present(present)

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        """Count votes; arguments as for ``BucketVote.count``."""
        return self.vote.count(self.kernels, votes, present, first_shard, self.coins)

    def start_sum(self, votes: Tensor, present: Tensor) -> Tensor:
        """Turn one worker's votes on all shards into a packed sum, of one vote."""
        vote = self.vote
        if vote.roster.is_weighted:
            raise InvalidArgumentError(
                "packed sums count votes alike, and workers have weights. Expected weights of 1; "
                "or use a pattern without packed sums, such as AllReduce()"
            )
        packed = votes.contiguous().view(torch.int64).view(1, -1, vote.vote_planes, BLOCK_WORDS)
        cast = BlockVotes(packed, present.unsqueeze(0), vote.bucket, 0)
        planes = start_sum(cast, vote_format=vote.rule.vote_format)
        return planes.view(-1).view(torch.uint8)

    def add_sums(self, first: Tensor, second: Tensor, n_votes: int) -> Tensor:
        """Add two packed sums, in any order, into one of ``n_votes`` votes."""
        n_planes = count_sum_planes(self.vote.vote_planes, n_votes)
        planes = add_sums(self._planes_of(first), self._planes_of(second), n_planes)
        return planes.view(-1).view(torch.uint8)

    def settle_sum(self, total: Tensor, n_present: Tensor) -> Tensor:
        """Turn the packed sum of all votes into the reply, bitwise that of ``reduce``."""
        vote = self.vote
        shape = vote.bucket.n_blocks, vote.reply_planes, BLOCK_WORDS
        out = total.new_empty(shape, dtype=torch.int64)
        settle_sum(
            self._planes_of(total),
            n_present,
            vote.bucket,
            self.coins.tie,
            vote_planes=vote.vote_planes,
            vote_format=vote.rule.vote_format,
            reply_format=vote.reply_format,
            out=out,
        )
        return out.view(-1).view(torch.uint8)

    def _planes_of(self, total: Tensor) -> Tensor:
        n_words = self.vote.bucket.n_blocks * BLOCK_WORDS
        words = total.contiguous().view(torch.int64)
        return words.view(-1, n_words) if n_words else words.view(1, 0)


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


def make_worker_state(rule: Aggregation, param: Tensor) -> dict[str, Tensor]:
    """Return a worker's state of a parameter before its first vote: zeros."""
    return {name: torch.zeros_like(param, dtype=torch.float32) for name in rule.worker_state}

"""The ops that count votes, in plain torch: the part of ``reference.Kernels`` without segments.

``contract.py`` has the notation and the rules for all ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import FLOAT_PLANES
from distlion.kernels.words import (
    Run,
    coin_bits,
    cut_runs,
    interleave,
    pack,
    read_steps,
    split_planes,
    tree_sum,
    unpack,
    word_range,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout, Slot


class BlockVotes(NamedTuple):
    """The votes of some workers on some blocks of a bucket.

    Attributes:
        packed: (workers, blocks, planes, 8) int64, on the device where they are counted.
        present: (workers, n_params) on the CPU: bool, the votes cast for each parameter; or uint8,
            the number of times that each vote counts, 0 for none. Floats are added as often.
        bucket: The layout of the parameters.
        first_block: The bucket's block that ``packed`` begins with.
    """

    packed: Tensor
    present: Tensor
    bucket: BucketLayout
    first_block: int


class CountingKernels:
    """The counting ops of a backend. ``out`` is overwritten completely."""

    def count_signs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        """Take the majority of signs.

        Equation:
            S = sign(sum over workers present of +-1). On a tie the bit is the tie coin's; without a
            coin, S = 0.

        Args:
            votes: Votes of 1 plane.
            tie: The coin, or None for S = 0.
            out: (blocks, 1, 8) int64 with a coin (SIGN), (blocks, 2, 8) without (TERNARY).
        """
        planes = split_planes(votes.packed)

        def reply_of(run: Run) -> list[Tensor]:
            bits = run.bits(planes, 0)
            total = 2 * bits.sum(0, dtype=torch.int64) - bits.shape[0]
            return [total > 0, total != 0] if tie is None else [_sign_or_coin(total, tie, run)]

        _count(votes, out, reply_of)

    def count_ternary(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Take the sign of the sum of votes in {-1, 0, 1}.

        Arguments as ``count_signs``; ``votes`` and ``out`` have 2 planes.
        """
        planes = split_planes(votes.packed)

        def reply_of(run: Run) -> list[Tensor]:
            sign, non_zero = run.bits(planes, 0).to(torch.int64), run.bits(planes, 1)
            total = ((2 * sign - 1) * non_zero).sum(0)
            return [total > 0, total != 0]

        _count(votes, out, reply_of)

    def count_pairs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        """Take the majority of directions where that of gradients has its sign.

        Equation:
            C = sum over workers present of the sign in plane 0, and G of that in plane 1
            S = sign(C) if C * G > 0; else the tie coin decides, or without a coin, S = 0

        Arguments as ``count_signs``; ``votes`` has 2 planes.
        """
        planes = split_planes(votes.packed)

        def reply_of(run: Run) -> list[Tensor]:
            directions, gradients = (
                2 * run.bits(planes, plane).sum(0, dtype=torch.int64) - len(run.voters)
                for plane in range(2)
            )
            agreed = torch.where(directions * gradients > 0, directions, 0)
            return [agreed > 0, agreed != 0] if tie is None else [_sign_or_coin(agreed, tie, run)]

        _count(votes, out, reply_of)

    def count_ones(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Count the +1 votes of the workers present.

        Arguments as ``count_signs``; ``out`` has the planes of a COUNT.
        """
        planes = split_planes(votes.packed)

        def reply_of(run: Run) -> list[Tensor]:
            ones = run.bits(planes, 0).sum(0, dtype=torch.int64)
            return [(ones >> bit) & 1 for bit in range(out.shape[1])]

        _count(votes, out, reply_of)

    def count_levels(self, votes: BlockVotes, tie: Coin, *, out: Tensor) -> None:
        """Take the sign of the sum of odd levels, ties by the coin.

        Arguments as ``count_signs``; ``votes`` has p planes, ``out`` 1.
        """
        planes = split_planes(votes.packed)

        def reply_of(run: Run) -> list[Tensor]:
            level = torch.ones_like(run.bits(planes, 0), dtype=torch.int64)
            for plane in range(1, votes.packed.shape[2]):
                level += run.bits(planes, plane).to(torch.int64) << plane
            total = ((2 * run.bits(planes, 0).to(torch.int64) - 1) * level).sum(0)
            return [_sign_or_coin(total, tie, run)]

        _count(votes, out, reply_of)

    def sum_directions(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None:
        """Take the sign of the sum of directions, added in float32 in rank order; 0 stays 0.

        Arguments as ``count_signs``, ``votes`` with 32 or 16 planes, ``out`` with 2.
        """
        values = votes.packed.flatten(1).view(dtype)

        def reply_of(run: Run) -> list[Tensor]:
            start = run.words.start * WORD_ELEMENTS
            directions = values[run.voters, start : start + run.n_elements]
            total = torch.zeros_like(directions[0], dtype=torch.float32)
            for direction in directions:
                total = total + direction.float()
            return [total > 0, total != 0]

        _count(votes, out, reply_of)

    def add_steps(
        self,
        estimates: Sequence[Tensor],
        slots: Sequence[Slot],
        present: Sequence[bool],
        votes: Tensor,
        scales: Tensor,
    ) -> None:
        """Move a worker's estimates by its vote, in place: h' = fl(h + q), q = +-scale.

        Args:
            estimates: For each parameter h, as ``encode_rests``; written where it votes.
            slots: Their places in the bucket.
            present: For each parameter, whether the worker votes.
            votes: (blocks, 1 or 2, 8) int64 of the whole bucket.
            scales: (n_params, 1 or 2) float32.
        """
        planes = split_planes(votes)
        for index, estimate in enumerate(estimates):
            slot = slots[index]
            if present[index] and slot.n_elements:
                steps = read_steps(planes[:, word_range(slot)], slot.n_elements, scales[index])
                estimate.add_(steps.view(estimate.shape))

    def add_steps_of_all(self, estimates: Tensor, votes: BlockVotes, scales: Tensor) -> None:
        """Move the estimates of all workers by their votes on some blocks, in place.

        Args:
            estimates: (workers, 512 blocks) float32, contiguous: h of each worker; written.
            votes: Votes of 1 or 2 planes.
            scales: (workers, n_params, 1 or 2) float32.
        """
        packed, present, bucket, first_block = votes
        planes = split_planes(packed)
        for index, slot in enumerate(bucket.slots):
            alone, is_present = replace(bucket, slots=(slot,)), present[:, index : index + 1]
            # Read on the host, where they are: the voters of a run are on the device.
            voters = is_present.flatten().nonzero().flatten().tolist()
            for run in cut_runs(
                alone, is_present, first_block, packed.shape[1], device=packed.device
            ):
                start = run.words.start * WORD_ELEMENTS
                for worker in voters:
                    estimates[worker, start : start + run.n_elements] += read_steps(
                        planes[worker, :, run.words], run.n_elements, scales[worker, index]
                    )

    def count_steps(
        self,
        votes: BlockVotes,
        scales: Tensor,
        tie: Coin,
        *,
        weights: Sequence[int],
        estimates: Tensor | None,
        out: Tensor,
        sums: Tensor,
    ) -> None:
        """Take the sign of the weighted sum of scaled votes, or of estimates after these votes.

        Equation:
            T = sum over all workers, in order and from 0, of fl(w * fl(h + q)); each sum is rounded
                to float32; q = +-scale, or 0 where the worker is absent
            S = sign(T); where T = 0 the tie coin decides. A parameter without votes has bits of 0.

        Args:
            votes: Votes of 1 or 2 planes, on whole shards; ``present`` is bool.
            scales: (workers, n_params, 1 or 2) float32.
            tie: The coin.
            weights: w of each worker, 1 or more.
            estimates: (workers, 512 blocks) float32, contiguous: h of each worker; None for 0.
            out: (blocks, 1, 8) int64.
            sums: (n_shards, n_params) float64, contiguous: sum of |T| over the elements of each
                parameter in each shard, by the tree of ``encode_rests`` from the first of them on;
                0 for a parameter outside a shard. Overwritten.
        """
        packed, present, bucket, first_block = votes
        n_elements = packed.shape[1] * BLOCK_WORDS * WORD_ELEMENTS
        total = torch.zeros(1, n_elements, dtype=torch.float32, device=packed.device)
        for worker, weight in enumerate(weights):
            own = slice(worker, worker + 1)
            after = torch.zeros_like(total) if estimates is None else estimates[own].clone()
            one = votes._replace(packed=packed[own], present=present[own])
            self.add_steps_of_all(after, one, scales[own])
            total += after if weight == 1 else after * weight
        summed = (
            total.view(-1).view(torch.int64).view(1, packed.shape[1], FLOAT_PLANES, BLOCK_WORDS)
        )
        anybody = present.any(0, keepdim=True)
        count_estimates(self, votes._replace(packed=summed, present=anybody), tie, out=out)
        sums.zero_()
        first_shard = first_block // max(1, bucket.shard_blocks)
        for row in range(len(sums)):
            for index, slot in bucket.cuts[first_shard + row]:
                start = (slot.bucket_word - first_block * BLOCK_WORDS) * WORD_ELEMENTS
                sums[row, index] = tree_sum(total[0, start : start + slot.n_elements].abs())


def count_estimates(
    kernels: CountingKernels, estimates: BlockVotes, tie: Coin, *, out: Tensor
) -> None:
    """Take the sign of the sum of all workers' estimates, the tie coin's where it is 0.

    Args:
        kernels: A backend, which sums directions in float32 and in rank order.
        estimates: Votes of 32 planes, whose bytes are 512 values of each block. An absent worker's
            estimate still counts; for a parameter without votes, all bits are 0.
        tie: The coin.
        out: (blocks, 1, 8) int64. Overwritten.
    """
    packed, present, bucket, first_block = estimates
    voted = present.any(0, keepdim=True)
    everybody = voted.expand(len(packed), -1).contiguous()
    signs = out.new_empty(out.shape[0], 2, BLOCK_WORDS)
    kernels.sum_directions(estimates._replace(present=everybody), dtype=torch.float32, out=signs)
    sign, is_not_zero = split_planes(signs)
    for run in cut_runs(bucket, voted, first_block, out.shape[0], device=out.device):
        used = pack(torch.ones(run.n_elements, dtype=torch.uint8, device=out.device))
        ties = coin_bits(tie, run, device=out.device) & ~is_not_zero[run.words] & used
        sign[run.words] |= ties
    interleave(sign.view(1, -1), out)


def _count(votes: BlockVotes, out: Tensor, reply_of: Callable[[Run], Sequence[Tensor]]) -> None:
    """Write the planes ``reply_of(run)``, (n_elements,) of 0 and 1 each; all else is zeros."""
    planes = out.new_zeros(out.shape[1], out.shape[0] * BLOCK_WORDS)
    _, present, bucket, first_block = votes
    for run in cut_runs(bucket, present, first_block, out.shape[0], device=out.device):
        for plane, bits in enumerate(reply_of(run)):
            planes[plane, run.words] = pack(bits)
    interleave(planes, out)


def _sign_or_coin(total: Tensor, tie: Coin, run: Run) -> Tensor:
    """Turn (n,) sums into sign bits, the coin's on a tie."""
    flips = coin_bits(tie, run, device=total.device)
    return torch.where(total == 0, unpack(flips, run.n_elements), (total > 0).to(torch.uint8))

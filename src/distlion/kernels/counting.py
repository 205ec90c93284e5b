"""The ops that count votes: the part of ``contract.Kernels`` without segments.

``contract.py`` has the notation and the rules for all ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.layout import BucketLayout, Slot


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


class CountingKernels(Protocol):
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
        ...

    def count_ternary(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Take the sign of the sum of votes in {-1, 0, 1}.

        Arguments as ``count_signs``; ``votes`` and ``out`` have 2 planes.
        """
        ...

    def count_pairs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        """Take the majority of directions where that of gradients has its sign.

        Equation:
            C = sum over workers present of the sign in plane 0, and G of that in plane 1
            S = sign(C) if C * G > 0; else the tie coin decides, or without a coin, S = 0

        Arguments as ``count_signs``; ``votes`` has 2 planes.
        """
        ...

    def count_ones(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Count the +1 votes of the workers present.

        Arguments as ``count_signs``; ``out`` has the planes of a COUNT.
        """
        ...

    def count_levels(self, votes: BlockVotes, tie: Coin, *, out: Tensor) -> None:
        """Take the sign of the sum of odd levels, ties by the coin.

        Arguments as ``count_signs``; ``votes`` has p planes, ``out`` 1.
        """
        ...

    def sum_directions(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None:
        """Take the sign of the sum of directions, added in float32 in rank order; 0 stays 0.

        Arguments as ``count_signs``, ``votes`` with 32 or 16 planes, ``out`` with 2.
        """
        ...

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
        ...

    def add_steps_of_all(self, estimates: Tensor, votes: BlockVotes, scales: Tensor) -> None:
        """Move the estimates of all workers by their votes on some blocks, in place.

        Args:
            estimates: (workers, 512 blocks) float32, contiguous: h of each worker; written.
            votes: Votes of 1 or 2 planes.
            scales: (workers, n_params, 1 or 2) float32.
        """
        ...

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
        ...

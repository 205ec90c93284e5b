"""The ops that votes are counted by: the part of ``contract.Kernels`` that sees no segments.

Notation and what holds for all ops stand in ``contract.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.layout import Bucket, Slot


class BlockVotes(NamedTuple):
    """The votes of some workers on some blocks of a bucket.

    Attributes:
        packed: (workers, blocks, planes, 8) int64, where they are counted.
        present: (workers, n_params) on the CPU: bool, who votes for which parameter of the bucket;
            or uint8, how many times each vote counts, 0 for absent. Floats are added so often.
        bucket: Where parameters lie.
        first_block: The bucket's block that ``packed`` begins with.
    """

    packed: Tensor
    present: Tensor
    bucket: Bucket
    first_block: int


class CountingKernels(Protocol):
    """What a backend implements of them. ``out`` is overwritten whole."""

    def count_signs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        """Take the majority of signs.

        Equation:
            S = sign(sum over workers present of +-1). On a tie the bit is the tie coin's; without a
            coin, S = 0.

        Args:
            votes: Of 1 plane.
            tie: The coin, or None for S = 0.
            out: (blocks, 1, 8) int64 with a coin (SIGN), (blocks, 2, 8) without (TERNARY).
        """
        ...

    def count_ternary(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Take the sign of the sum of votes in {-1, 0, 1}.

        Arguments as ``count_signs``; ``votes`` and ``out`` have 2 planes.
        """
        ...

    def count_ones(self, votes: BlockVotes, *, out: Tensor) -> None:
        """Count the +1 votes of those present.

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
    ) -> list[Tensor]:
        """Return a worker's estimates after its vote; those without a vote as they are.

        Args:
            estimates: For each parameter h, as ``encode_rests``.
            slots: Their places in the bucket.
            present: For which of them the worker votes.
            votes: (blocks, 1 or 2, 8) int64 of the whole bucket.
            scales: (n_params, 1 or 2) float32.

        Returns:
            Of each parameter fl(h + q), q = +-scale; new tensors where it votes.
        """
        ...

    def add_steps_of_all(
        self, estimates: Tensor, votes: BlockVotes, scales: Tensor, *, out: Tensor
    ) -> None:
        """Write the estimates of all workers after their votes on some blocks.

        Args:
            estimates: (workers, 512 blocks) float32: h of each worker; 0 between parameters.
            votes: Of 1 or 2 planes.
            scales: (workers, n_params, 1 or 2) float32.
            out: As ``estimates``, contiguous; may be the same tensor. Overwritten.
        """
        ...

"""Count ballots: one outcome for each parameter, the same for any order of arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.kernels import Coin
from distlion.kernels.words import coin_bits, unpack
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketShape
from distlion.votes import Roster, ScaledVote
from distlion.votes.scaled import ScaledBucket
from distlion_flower.ballot import Ballot
from distlion_flower.places import Places
from distlion_flower.refusals import read_scales

MOST_VOTES = 1 << 24
"""Largest number of votes with a sum that float32 represents exactly."""


def weigh(examples: Sequence[int], *, max_weight: float) -> list[int]:
    """Return each ballot's number of votes.

    Equation:
        w_i = min(n_i, floor(max_weight * median n)), the lower median. If these sum to more than
        2^24, each is divided by one whole number and rounded down, to at least 1.

    Args:
        examples: Number n of examples of each ballot, 1 or more.
        max_weight: Largest weight in units of the median, 1 or more.
    """
    most = math.floor(max_weight * find_median(examples))
    votes = [min(n, most) for n in examples]
    if sum(votes) > MOST_VOTES:
        divisor = -(-sum(votes) // (MOST_VOTES - len(votes)))
        votes = [max(1, n // divisor) for n in votes]
    return votes


def find_median(numbers: Sequence[int]) -> int:
    """Return the lower median; fewer than half of the numbers cannot raise it."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


class BallotCount:
    """Count the ballots of one round.

    Args:
        places: Places of elements.

    Attributes:
        shape: Sizes of a vote.
    """

    def __init__(self, places: Places) -> None:
        self._bucket = places.bucket
        self._reader = _BallotReader(ScaledVote(), places.bucket, Roster.of(1))
        self.shape: BucketShape = self._reader.shape

    def read_scales(self, ballots: Sequence[Ballot]) -> Tensor:
        """Return the scales of all ballots: (n_ballots, n_params) float32."""
        n_params = len(self._bucket.slots)
        scales = [read_scales(ballot.payload, self.shape, n_params) for ballot in ballots]
        return torch.stack(scales)

    def mean_of_signs(
        self, ballots: Sequence[Ballot], votes: Sequence[int], reach: Sequence[float]
    ) -> list[Tensor]:
        """Return the outcome of stochastic signs.

        Equation:
            u = fl(fl(b / W) * T),  T = sum_i w_i s_i,  W = sum_i w_i, the division in double

        Args:
            ballots: Ballots taken.
            votes: Number w of votes of each.
            reach: b of each parameter.

        Returns:
            For each parameter u, flat.
        """
        total = self._tally(ballots, votes)
        rates = [torch.tensor(b / sum(votes), dtype=torch.float32, device="cpu") for b in reach]
        return [part * rate for part, rate in zip(self._cut(total.float()), rates, strict=True)]

    def majority(
        self, ballots: Sequence[Ballot], votes: Sequence[int], scales: Tensor, tie: Coin
    ) -> list[Tensor]:
        """Return a majority's outcome: u = s * S, S = sign(sum_i w_i s_i), ties by the coin."""
        outcome = []
        parts = self._cut(self._tally(ballots, votes))
        for slot, total, scale in zip(self._bucket.slots, parts, scales, strict=True):
            ties = unpack(coin_bits(tie, slot, device=total.device), slot.n_elements)
            is_positive = torch.where(total == 0, ties, total > 0)
            outcome.append((2 * is_positive.float() - 1) * scale)
        return outcome

    def mean_of_scaled_signs(
        self, ballots: Sequence[Ballot], votes: Sequence[int], largest: Tensor
    ) -> list[Tensor]:
        """Return the mean of the clients' signs, each with its own scale.

        Equation:
            u = sum_i fl(w_i min(a_i, largest) / W) s_i, with the coefficient in double and the sum
            in float32, in the given order

        Args:
            ballots: Ballots taken.
            votes: Number w of votes of each.
            largest: (n_params,) float32, the largest scale that counts.
        """
        n_params = len(self._bucket.slots)
        total = [
            torch.zeros(slot.n_elements, dtype=torch.float32, device="cpu")
            for slot in self._bucket.slots
        ]
        for ballot, n in zip(ballots, votes, strict=True):
            signs = self._cut(self._unpack(ballot))
            scales = read_scales(ballot.payload, self.shape, n_params).minimum(largest)
            rates = (scales.double() * n / sum(votes)).float()
            for index, part in enumerate(signs):
                total[index] += part * rates[index]
        return total

    def _tally(self, ballots: Sequence[Ballot], votes: Sequence[int]) -> Tensor:
        """Return sum_i w_i s_i, (512 * blocks,) int32; integers add up exactly in any order."""
        n_elements = self._bucket.n_blocks * BLOCK_WORDS * WORD_ELEMENTS
        total = torch.zeros(n_elements, dtype=torch.int32, device="cpu")
        for ballot, n in zip(ballots, votes, strict=True):
            total += self._unpack(ballot) * n
        return total

    def _unpack(self, ballot: Ballot) -> Tensor:
        """Unpack a ballot's bits to +1 and -1: (512 * blocks,) int32."""
        words = self._reader.read(ballot).view(-1)
        return 2 * unpack(words, WORD_ELEMENTS * len(words)).to(torch.int32) - 1

    def _cut(self, elements: Tensor) -> list[Tensor]:
        """Cut the elements of a bucket into each parameter's elements."""
        starts = [slot.bucket_word * WORD_ELEMENTS for slot in self._bucket.slots]
        return [
            elements[start : start + slot.n_elements]
            for start, slot in zip(starts, self._bucket.slots, strict=True)
        ]


class _BallotReader(ScaledBucket):
    """A reader of ballots' bits: with every rule here, they have the layout of a scaled vote."""

    def read(self, ballot: Ballot) -> Tensor:
        """Return the bits, (1, blocks, 1, 8) int64."""
        row = torch.frombuffer(bytearray(ballot.payload), dtype=torch.uint8).view(1, -1)
        packed, _ = self._split_votes(row)
        return packed

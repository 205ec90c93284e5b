"""The roster of voters: their ids, rows and weights, and the owners of shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.numpy_numbers import as_python, keep_as_python

MOST_EPOCHS = 1 << 32
"""The epoch takes 32 bits in a frame."""
MOST_IDS = 1 << 63
"""Coins are keyed by an id and a few numbers, in 64 bits."""
MOST_WEIGHT = 255
"""Ops take the number of times that a vote counts as a byte."""
MOST_VOTES = 4096
"""The most that the C++ core adds for an element, in votes of 8 bits."""


@dataclass(frozen=True)
class Roster:
    """The voters, until membership changes.

    Attributes:
        ids: A number for each voter, which it keeps while others come and go, and on which its
            coins depend. The place of an id is its row in tensors of votes.
        owners: For each shard of a bucket, the id of the voter that counts it.
        weights: For each voter, the number of times that its vote counts, 1 to 255. Unless all are
            1, they add up to 4,096 at most.
        epoch: Number that grows with every change of membership. Bytes of another epoch are
            refused.

    Raises:
        InvalidArgumentError: Ids repeat, an owner does not vote, or a number is out of its range.
        UnsupportedTypeError: A number is not an integer.
    """

    ids: tuple[int, ...]
    owners: tuple[int, ...]
    weights: tuple[int, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        for name in ("ids", "owners", "weights"):
            object.__setattr__(self, name, tuple(map(as_python, getattr(self, name))))
        keep_as_python(self, "epoch")
        for number in (*self.ids, *self.owners, *self.weights, self.epoch):
            if not isinstance(number, int) or isinstance(number, bool):
                raise UnsupportedTypeError(f"a roster has the number {number!r}; expected integers")
        if (
            not self.ids
            or min(self.ids) < 0
            or max(self.ids) >= MOST_IDS
            or len(set(self.ids)) < len(self.ids)
        ):
            raise InvalidArgumentError(
                f"a roster has the ids {self.ids}; expected one or more, all different, of 0 to "
                f"{MOST_IDS - 1:,}"
            )
        if not self.owners or not set(self.owners) <= set(self.ids):
            raise InvalidArgumentError(
                f"shards are counted by {self.owners}; expected some of the voters, {self.ids}"
            )
        if (
            len(self.weights) != len(self.ids)
            or min(self.weights) < 1
            or max(self.weights) > MOST_WEIGHT
            or (self.is_weighted and self.n_votes > MOST_VOTES)
        ):
            raise InvalidArgumentError(
                f"{len(self.ids)} voters have the weights {self.weights}; expected one each, of 1 "
                f"to {MOST_WEIGHT}, and {MOST_VOTES:,} votes in all. Only ratios matter: use "
                "smaller weights"
            )
        if not 0 <= self.epoch < MOST_EPOCHS:
            raise InvalidArgumentError(
                f"the epoch is {self.epoch}; expected 0 to {MOST_EPOCHS - 1:,}"
            )

    @classmethod
    def of(cls, n_voters: int, *, epoch: int = 0) -> Roster:
        """Return a roster of voters 0 to N - 1, each with one vote and one shard."""
        everybody = tuple(range(n_voters))
        return cls(everybody, everybody, (1,) * n_voters, epoch)

    @cached_property
    def n_voters(self) -> int:
        """Rows of a tensor of votes."""
        return len(self.ids)

    @property
    def n_shards(self) -> int:
        """Shards of a bucket."""
        return len(self.owners)

    @property
    def is_weighted(self) -> bool:
        """True if some vote counts more than once."""
        return self.n_votes > self.n_voters

    @cached_property
    def n_votes(self) -> int:
        """The most votes that a parameter can get: the sum of weights."""
        return sum(self.weights)

    @cached_property
    def counted_rows(self) -> tuple[int, ...]:
        """Rows of votes to count, each as often as its voter's weight."""
        rows = enumerate(self.weights)
        return tuple(row for row, weight in rows for _ in range(weight))

    def weigh(self, present: Tensor) -> Tensor:
        """Return the number of times that each vote counts.

        Args:
            present: (voters, n_params) bool on the CPU: the votes cast for each parameter.

        Returns:
            ``present`` itself where every vote counts once; else (voters, n_params) uint8.

        Raises:
            InvalidArgumentError: These are not the votes of all voters.
        """
        if not self.is_weighted:
            return present
        if len(self.weights) != len(present):
            raise InvalidArgumentError(
                f"{len(present)} votes are counted, and {len(self.weights)} weights are known. "
                "Expected one each. A pattern must count weighted votes all at once"
            )
        times = torch.tensor(self.weights, dtype=torch.uint8, device="cpu")
        return present.to(torch.uint8) * times[:, None]

"""The roster of voters: their ids, rows and weights, and the owners of shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distlion.errors import InvalidArgumentError, UnsupportedTypeError

MOST_EPOCHS = 1 << 32
"""The epoch takes 32 bits in a frame."""
MOST_IDS = 1 << 63
"""Coins are keyed by an id and a few numbers, in 64 bits."""


@dataclass(frozen=True)
class Roster:
    """The voters, until membership changes.

    Attributes:
        ids: A number for each voter, which it keeps while others come and go, and on which its
            coins depend. The place of an id is its row in tensors of votes.
        owners: For each shard of a bucket, the id of the voter that counts it.
        weights: For each voter, the weight of its vote: an integer, 1 or more.
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
            object.__setattr__(self, name, tuple(getattr(self, name)))
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
        if len(self.weights) != len(self.ids) or min(self.weights) < 1:
            raise InvalidArgumentError(
                f"{len(self.ids)} voters have the weights {self.weights}; expected one each, of at "
                "least 1"
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

    def find_row(self, voter: int) -> int:
        """Return the row of a voter's votes, by its id."""
        return self.ids.index(voter)

"""A roster: five numbers that need not be equal, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.votes import Roster


def test_a_roster_of_equals_has_a_shard_and_a_vote_for_each() -> None:
    roster = Roster.of(3, epoch=4)
    assert roster == Roster(ids=(0, 1, 2), owners=(0, 1, 2), weights=(1, 1, 1), epoch=4)
    assert (roster.n_voters, roster.n_shards, roster.n_votes) == (3, 3, 3)
    assert not roster.is_weighted


def test_voters_owners_votes_rows_and_ids_are_told_apart() -> None:
    roster = Roster(ids=(7, 2, 9), owners=(9, 7, 9, 7), weights=(1, 3, 1), epoch=1)
    assert (roster.n_voters, roster.n_shards, roster.n_votes) == (3, 4, 5)
    assert roster.counted_rows == (0, 1, 1, 1, 2)
    assert roster.is_weighted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": ()}, "has the ids"),
        ({"ids": (0, 0)}, "has the ids"),
        ({"ids": (0, -1)}, "has the ids"),
        ({"owners": ()}, "are counted by"),
        ({"owners": (0, 5)}, "are counted by"),
        ({"weights": (1,)}, "have the weights"),
        ({"weights": (1, 0)}, "have the weights"),
        ({"ids": (0, 1 << 63)}, "has the ids"),
        ({"epoch": -1}, "the epoch is"),
        ({"epoch": 1 << 32}, "the epoch is"),
    ],
)
def test_a_roster_that_is_none_is_refused(change: dict[str, Any], said: str) -> None:
    whole: dict[str, Any] = {"ids": (0, 1), "owners": (0, 1), "weights": (1, 1), "epoch": 0}
    with pytest.raises(InvalidArgumentError, match=said):
        Roster(**whole | change)


@pytest.mark.parametrize(
    "change", [{"ids": (0.5, 1)}, {"weights": (True, 1)}, {"epoch": 1.0}, {"owners": ("0",)}]
)
def test_a_number_that_is_no_integer_is_refused(change: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"ids": (0, 1), "owners": (0, 1), "weights": (1, 1), "epoch": 0}
    with pytest.raises(UnsupportedTypeError, match="expected integers"):
        Roster(**whole | change)


def test_lists_become_tuples_so_that_a_roster_is_one_for_good() -> None:
    roster = Roster([0, 1], [0, 1], [1, 1])  # type: ignore[arg-type]
    assert hash(roster) == hash(Roster.of(2))

"""A worker that will join announces itself, and one of the members offers its parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from asks import make_epoch, make_lookout, make_member, make_store
from distlion.crew.donor import Donor, Feed
from distlion.crew.epoch import Epoch
from distlion.crew.lookout import Lookout
from distlion.crew.offers import Announcements, Offer, announce, name_join
from distlion.crew.signed import SignedStore


def list_ids(announcements: Announcements, store: SignedStore, n_served: int) -> list[int]:
    """Look once, as a member that serves so many; return whom it is to offer itself."""
    return [member.id for _, member in announcements.list_due(store, lambda: n_served)]


def test_an_announcement_of_another_version_or_secret_is_passed_over() -> None:
    store = make_store()
    announcements = Announcements()
    announcements.begin(store)
    later = {**make_member(4).describe(), "shoes": 2}
    store.set(name_join(store.add("joins", 1)), json.dumps(later))
    announce(make_store(b"another key", store.plain), make_member(5))
    announce(store, make_member(6))
    assert list_ids(announcements, store, 0) == [6]


def test_announcements_in_a_store_that_has_come_back_empty_are_seen() -> None:
    before, after = make_store(), make_store()
    for number in range(3):
        announce(before, make_member(number))
    announcements = Announcements()
    announcements.begin(before)
    assert list_ids(announcements, before, 0) == []
    announce(after, make_member(6))
    assert list_ids(announcements, after, 0) == [6]
    assert list_ids(announcements, after, 0) == []


@pytest.mark.parametrize("n_served", [0, 1, 2])
def test_a_member_lets_one_look_pass_for_each_worker_that_it_serves(n_served: int) -> None:
    store, announcements = make_store(), Announcements()
    announcements.begin(store)
    announce(store, make_member(6))
    looks = [list_ids(announcements, store, n_served) for _ in range(4)]
    assert looks == [[6] if number == n_served else [] for number in range(4)]


class Side:
    """A member that looks for announcements, and offers to serve them."""

    def __init__(self, store: SignedStore, epoch: Epoch) -> None:
        self.lookout: Lookout = make_lookout(store)
        rendezvous: Any = self.lookout._rendezvous
        rendezvous.address = ("127.0.0.1", 1)
        self.lookout.donor = self.donor = Donor(rendezvous)
        self.lookout.ended.set()  # its thread looks at no time of its own
        self.lookout._epoch = self._epoch = epoch

    def look(self) -> None:
        self.lookout._answer_announcements(self._epoch)

    def end(self) -> None:
        for feed in self.donor._feeds:
            feed._listener.close()


@pytest.fixture
def store() -> SignedStore:
    return make_store()


@pytest.fixture
def sides(store: SignedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Side]]:
    """Two members that have looked once, whose newcomers stay on their way."""
    monkeypatch.setattr(Feed, "start", lambda feed: None)
    epoch = make_epoch(store, 0, 1)
    made = [Side(store, Epoch(3, epoch.members, place, epoch.store)) for place in range(2)]
    for side in made:
        side.look()
    yield made
    for side in made:
        side.end()


def find_donor(store: SignedStore, number: int) -> int | None:
    """Return who has made an offer; None where nobody has."""
    key = f"{name_join(number)}/offer"
    return Offer(*json.loads(store.get(key))).donor if store.check([key]) else None


@pytest.mark.parametrize("at_once", [False, True])
def test_of_two_newcomers_each_has_a_donor_of_its_own(
    store: SignedStore, sides: list[Side], *, at_once: bool
) -> None:
    busy, idle = sides
    numbers = []
    for newcomer in (6, 7):
        numbers.append(announce(store, make_member(newcomer)))
        if newcomer == 7 or not at_once:
            busy.look()  # it is the first to look for both
            idle.look()
    busy.look()
    assert [find_donor(store, number) for number in numbers] == [0, 1]
    assert [side.donor.n_served for side in sides] == [1, 1]


def test_a_member_serves_another_newcomer_where_nobody_else_offers(
    store: SignedStore, sides: list[Side]
) -> None:
    alone, _ = sides
    numbers = []
    for newcomer in (6, 7):
        numbers.append(announce(store, make_member(newcomer)))
        alone.look()
    assert find_donor(store, numbers[1]) is None
    alone.look()
    assert [find_donor(store, number) for number in numbers] == [0, 0]
    assert alone.donor.n_served == 2

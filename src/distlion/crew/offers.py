"""Announcements of workers that will join, and members' offers of their parameters."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlion.crew.epoch import Member
from distlion.crew.signed import SignedStore
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

_COUNT = "joins"
_POLL_S = 0.02
_MOST_LOOKS = 40
"""Looks after which an announcement without an offer is forgotten."""


class Offer(NamedTuple):
    """A member's offer of its parameters, or its refusal.

    Attributes:
        donor: The member's id; None for a refusal.
        addresses: Where it listens: pairs of a host and a port.
        nonce: Words of its listener.
        why: Reason of a refusal.
    """

    donor: int | None
    addresses: list[list[Any]]
    nonce: str
    why: str = ""


def name_join(number: int) -> str:
    """Return the key of an announcement."""
    return f"join/{number}"


def announce(store: SignedStore, own: Member) -> int:
    """Announce that this worker will ask to be let in; return the announcement's number."""
    number = store.add(_COUNT, 1)
    store.set(name_join(number), json.dumps(own.describe()))
    return number


def await_offer(
    store: SignedStore, number: int, *, limit_s: float, check: Callable[[], None]
) -> Offer | None:
    """Wait for an offer; return None if none comes.

    Args:
        store: The run's store.
        number: Number of the announcement.
        limit_s: Seconds to wait.
        check: Function that raises where it is in vain.
    """
    key, until_s = f"{name_join(number)}/offer", time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() > until_s:
            return None
        check()
        time.sleep(_POLL_S)
    return store.read(key, lambda text: Offer(*json.loads(text)))


def make_offer(store: SignedStore, number: int, offer: Offer) -> bool:
    """Make an offer; return False if another member was faster."""
    text = json.dumps(offer)
    return store.compare_set(f"{name_join(number)}/offer", "", text) == text


class Announcements:
    """The announcements that a member looks at."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._looks: dict[int, int] = {}

    def begin(self, store: SignedStore) -> None:
        """Begin with those that come from now on; a later call changes nothing."""
        if self._next is None:
            self._next = store.add(_COUNT, 0) + 1

    def list_due(
        self, store: SignedStore, count_served: Callable[[], int]
    ) -> Iterator[tuple[int, Member]]:
        """List announcements that this member should offer itself for.

        It lets one more look pass for each worker that it serves, so that another one is faster.

        Args:
            store: The run's store.
            count_served: Function that counts the workers that it serves, which may grow meanwhile.
        """
        assert self._next is not None
        newest = store.add(_COUNT, 0)
        if newest < self._next - 1:  # another store, which has come back empty
            self._next, self._looks = 1, {}
        while self._next <= newest:
            self._looks[self._next] = 0
            self._next += 1
        for number, looks in list(self._looks.items()):
            key = name_join(number)
            self._looks[number] += 1
            if looks > _MOST_LOOKS or store.check([f"{key}/offer"]):
                del self._looks[number]
            elif looks >= count_served() and store.check([key]):
                del self._looks[number]
                try:
                    member = store.read(key, lambda text: Member(**json.loads(text)))
                except CrewError as error:  # of another version, or signed with another secret
                    logger.warning("a worker announces itself and gets no offer: %s", error)
                    continue
                yield number, member

"""Admission: a worker asks the members that train to let it in, which they do between epochs.

    worker                          members
    asks ─────────────────────────► say now and then that they have seen it
    says that it is still there ──► leave their epoch at one step, and decide on the next one
    ◄────────────────────────────── the next epoch, with this worker in it

All of it takes a few keys in the store, so that members are held up for milliseconds. If nobody has
seen it, the worker goes to the rendezvous. Members see nobody who signs with another secret.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlion.crew.member import STRANGER, Member
from distlion.crew.store import SignedStore
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

SEEN_S = 2.0
"""Seconds that a worker waits for the next sign that somebody trains."""
_POLL_S = 0.02
_NUMBERS, _ASKING = "asks", "asking"


@dataclass(frozen=True)
class Ask:
    """A worker that asks to be let in.

    Attributes:
        number: Its number among all asks of the run.
        member: The worker.
    """

    number: int
    member: Member

    def describe(self, store: SignedStore) -> dict[str, Any]:
        """Return it in the form that the store keeps, signed."""
        member = self.member.describe()
        signature = store.sign(f"ask/{self.number}", json.dumps(member))
        return {"number": self.number, "member": member, "signature": signature}

    @property
    def seen(self) -> str:
        """The key of the latest sign that a member has seen the ask."""
        return f"ask/{self.number}/seen"

    @property
    def ready(self) -> str:
        """The key with which the worker acknowledges that sign, to show that it is still there."""
        return f"ask/{self.number}/ready"

    @property
    def answer(self) -> str:
        """The key of the answer."""
        return f"ask/{self.number}/answer"


def ask(store: SignedStore, own: Member) -> dict[str, Any] | None:
    """Ask the members that train to let this worker in, and wait for the next epoch.

    Args:
        store: The keys of the run.
        own: This worker.

    Returns:
        Their decision; None if nobody trains.

    Raises:
        CrewError: They train with other parameters or settings.
    """
    mine = Ask(store.add(_NUMBERS, 1), own)
    _change(store, lambda asks: [*asks, mine])
    deadline_s, heard = time.monotonic() + SEEN_S, ""
    while not store.check([mine.answer]):
        word = store.get(mine.seen) if store.check([mine.seen]) else ""
        if word != heard:
            store.set(mine.ready, word)
            deadline_s, heard = time.monotonic() + SEEN_S, word
        if time.monotonic() > deadline_s:
            withdraw(store, [mine])
            break
        time.sleep(_POLL_S)
    if not store.check([mine.answer]):
        return None
    found: dict[str, Any] = store.read(mine.answer, json.loads)
    if not found:
        raise CrewError(STRANGER)
    return found


def list_asks(store: SignedStore) -> list[Ask]:
    """Return all asks without an answer."""
    return _read(store, store.plain.get(_ASKING)) if store.check([_ASKING]) else []


def list_ready(store: SignedStore, settings: int) -> list[Ask]:
    """Return the asks of workers that are ready and have the members' parameters and settings."""
    return [
        each
        for each in list_asks(store)
        if each.member.settings == settings and store.check([each.ready])
    ]


def answer(store: SignedStore, asks: Sequence[Ask], decision: dict[str, Any]) -> None:
    """Tell these workers the next epoch; an empty decision refuses them as strangers."""
    for each in asks:
        store.set(each.answer, json.dumps(decision))
    withdraw(store, asks)


def withdraw(store: SignedStore, asks: Sequence[Ask]) -> None:
    """Remove these asks from the list."""
    if asks:
        gone = {each.number for each in asks}
        _change(store, lambda found: [each for each in found if each.number not in gone])


def _change(store: SignedStore, change: Callable[[list[Ask]], list[Ask]]) -> None:
    """Change the list of asks, which others may change at the same time; each ask is signed."""
    before = store.plain.get(_ASKING).decode() if store.check([_ASKING]) else ""
    while True:
        after = json.dumps([each.describe(store) for each in change(_read(store, before))])
        found = store.plain.compare_set(_ASKING, before, after).decode()
        if found == after:
            return
        before = found


def _read(store: SignedStore, text: str | bytes) -> list[Ask]:
    """Read the asks; those of another version, or signed with another secret, are left out."""
    asks = []
    try:
        listed = json.loads(text) if text else []
    except (ValueError, RecursionError):
        listed = text
    for each in listed if isinstance(listed, list) else [listed]:
        try:
            found = Ask(each["number"], Member(**each["member"]))
            signature = str(each["signature"]).encode()
            is_ours = hmac.compare_digest(found.describe(store)["signature"].encode(), signature)
        except (KeyError, TypeError, ValueError):
            logger.warning("a worker asks the crew in an unknown format: %r", each)
            continue
        if is_ours:
            asks.append(found)
        else:
            logger.warning("%s asks the crew with another secret", found.member)
    return asks

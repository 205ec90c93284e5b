"""Admission: a worker asks those who train to let it in, and they do where an epoch ends.

    worker                          members
    asks ─────────────────────────► say now and then that they have seen it
    says that it is still there ──► leave their epoch at one step, and decide on the next one
    ◄────────────────────────────── the next epoch, with this worker in it

All of it is a few keys in the store, so that others are held up for milliseconds. Where nobody has
seen it, the worker goes to the rendezvous.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distlion.crew.member import STRANGER, Member
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

SEEN_S = 2.0
"""How long a worker waits for the next word that somebody trains."""
_POLL_S = 0.02
_NUMBERS, _ASKING = "asks", "asking"


@dataclass(frozen=True)
class Ask:
    """A worker that asks to be let in.

    Attributes:
        number: Of all that were ever asked in the run.
        member: The worker.
    """

    number: int
    member: Member

    @property
    def seen(self) -> str:
        """The key of the last word that a member has seen this."""
        return f"ask/{self.number}/seen"

    @property
    def ready(self) -> str:
        """The key of the last word of theirs that the worker has heard: it is still there."""
        return f"ask/{self.number}/ready"

    @property
    def answer(self) -> str:
        """The key of the answer."""
        return f"ask/{self.number}/answer"


def ask(store: Any, own: Member) -> dict[str, Any] | None:
    """Ask those who train to let this worker in, and wait for the next epoch.

    Args:
        store: The keys of the run.
        own: This worker.

    Returns:
        What they have decided; None where nobody trains.

    Raises:
        CrewError: They train with other parameters or settings.
    """
    mine = Ask(int(store.add(_NUMBERS, 1)), own)
    _change(store, lambda asks: [*asks, mine])
    deadline_s, heard = time.monotonic() + SEEN_S, b""
    while not store.check([mine.answer]):
        word = store.get(mine.seen) if store.check([mine.seen]) else b""
        if word != heard:
            store.set(mine.ready, word)
            deadline_s, heard = time.monotonic() + SEEN_S, word
        if time.monotonic() > deadline_s:
            withdraw(store, [mine])
            break
        time.sleep(_POLL_S)
    if not store.check([mine.answer]):
        return None
    found: dict[str, Any] = json.loads(store.get(mine.answer))
    if not found:
        raise CrewError(STRANGER)
    return found


def list_asks(store: Any) -> list[Ask]:
    """Return all that have asked and have no answer yet."""
    return _read(store.get(_ASKING)) if store.check([_ASKING]) else []


def list_ready(store: Any, settings: int) -> list[Ask]:
    """Return the askers that are ready and have the parameters and settings of the members."""
    return [
        each
        for each in list_asks(store)
        if each.member.settings == settings and store.check([each.ready])
    ]


def answer(store: Any, asks: Sequence[Ask], decision: dict[str, Any]) -> None:
    """Tell these workers the next epoch, or by an empty decision that they are strangers."""
    for each in asks:
        store.set(each.answer, json.dumps(decision))
    withdraw(store, asks)


def withdraw(store: Any, asks: Sequence[Ask]) -> None:
    """Take these off the list."""
    if asks:
        gone = {each.number for each in asks}
        _change(store, lambda found: [each for each in found if each.number not in gone])


def _change(store: Any, change: Callable[[list[Ask]], list[Ask]]) -> None:
    """Change the list of those who ask, which others may change at the same time."""
    before = store.get(_ASKING).decode() if store.check([_ASKING]) else ""
    while True:
        after = json.dumps([asdict(each) for each in change(_read(before))])
        found = store.compare_set(_ASKING, before, after).decode()
        if found == after:
            return
        before = found


def _read(text: str | bytes) -> list[Ask]:
    """Read those who ask; what cannot be read, as of another version, is left out and logged."""
    asks = []
    try:
        listed = json.loads(text) if text else []
    except ValueError:
        listed = text
    for each in listed if isinstance(listed, list) else [listed]:
        try:
            asks.append(Ask(each["number"], Member(**each["member"])))
        except (KeyError, TypeError):
            logger.warning("a worker asks the crew in another form than ours: %r", each)
    return asks

"""Admission: a worker asks to be let in, which is the only way into an epoch from outside.

    worker                          members
    asks ─────────────────────────► say now and then that they have seen it
    says that it is still there ──► leave their epoch at one step, and decide on the next one
    ◄────────────────────────────── the next epoch, with this worker in it

If no member has seen it, nobody trains. Then the workers that ask are the next members: the first
of them decides, once enough are there and no more have come for a while. Nobody sees a worker that
signs with another secret.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlion.crew.epoch import STRANGER, Member, TooFewError
from distlion.crew.signed import SignedStore
from distlion.crew.store import Rendezvous
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

SEEN_S = 2.0
"""Seconds that a worker waits for the next sign that somebody trains."""
LAST_CALL_S = 1.5
"""Seconds without a change after which enough workers begin."""
_BEAT_S, _SILENT_S = 0.25, 6.0
"""Seconds between two signs of a worker that asks, and without a sign until others leave it out."""
_POLL_S = 0.02
_NUMBERS, _ASKING = "asks", "asking"
ORPHAN = " without donor"
"""The end of a sign that a member has seen an ask whose worker follows somebody else."""


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
    def alive(self) -> str:
        """The key of the latest sign of the worker for others that ask."""
        return f"ask/{self.number}/alive"

    @property
    def answer(self) -> str:
        """The key of the answer."""
        return f"ask/{self.number}/answer"


Decide = Callable[[Sequence[Ask]], None]
"""Decide on the next epoch of workers that ask, and answer them; or find that it must not be."""


def ask(
    rendezvous: Rendezvous,
    own: Member,
    *,
    min_workers: int,
    limit_s: float,
    decide: Decide,
    is_ready: Callable[[bool], bool] = lambda _: True,
) -> dict[str, Any]:
    """Ask to be let in, and wait for the next epoch.

    Args:
        rendezvous: The rendezvous; its store keeps the asks.
        own: This worker.
        min_workers: Fewest workers that train.
        limit_s: Seconds to wait where nobody trains.
        decide: Function that decides for workers that ask.
        is_ready: Function that returns whether this worker may be let in now. Its argument is
            whether the worker that it follows, if any, is a member. What it raises ends the ask.

    Returns:
        The decision of the members, or of those that asked.

    Raises:
        TooFewError: Nobody trains, and too few have come in time.
        CrewError: The others train with other parameters or settings, or the run is over.
    """
    store = rendezvous.store
    rendezvous.check_secret()
    mine = Ask(store.add(_NUMBERS, 1), own)
    company = _Company(store, mine)
    _change(store, lambda asks: [*asks, mine])
    now_s = time.monotonic()
    until_s, beat_s, heard = now_s + limit_s, now_s, ""
    # After the store was away, members may come back later than this worker.
    alone_s = now_s + (SEEN_S + rendezvous.find_grace_s() if rendezvous.find_last_begun() else 0)
    while not store.check([mine.answer]):
        now_s, word = time.monotonic(), store.get(mine.seen) if store.check([mine.seen]) else ""
        if word != heard:
            if _is_ready(store, mine, word, is_ready):
                store.set(mine.ready, word)
            alone_s, heard = now_s + SEEN_S, word
        is_alone = now_s >= alone_s
        if is_alone and now_s > until_s:
            withdraw(store, [mine])
            if store.check([mine.answer]):
                break
            raise TooFewError(rendezvous.few)
        if now_s >= beat_s:
            beat_s = now_s + _BEAT_S
            rendezvous.check_open()
            rendezvous.is_somebody_alive()  # so that all silences are waited for at one time
            if company.is_complete(now_s, rendezvous, min_workers) and is_alone:
                decide(company.there)
        time.sleep(_BEAT_S / 2 if is_alone else _POLL_S)
    found: dict[str, Any] = store.read(mine.answer, json.loads)
    if "refused" in found:
        raise CrewError(found["refused"])
    return found


def _is_ready(store: SignedStore, mine: Ask, word: str, is_ready: Callable[[bool], bool]) -> bool:
    try:
        return is_ready(not word.endswith(ORPHAN))
    except BaseException:
        withdraw(store, [mine])
        raise


class _Company:
    """The workers that ask and are still there, as one of them sees it.

    Attributes:
        there: These workers, in the order of their asks.
    """

    def __init__(self, store: SignedStore, mine: Ask) -> None:
        self._store, self._mine = store, mine
        self._n_beats, self._since_s = 0, 0.0
        self._heard: dict[int, tuple[str, float]] = {}
        self.there: list[Ask] = []

    def is_complete(self, now_s: float, rendezvous: Rendezvous, min_workers: int) -> bool:
        """Show that this worker is there; return whether it decides, as the first of enough."""
        store, mine, before = self._store, self._mine, self._heard
        self._n_beats += 1
        store.set(mine.alive, str(self._n_beats))
        asks = list_asks(store)
        if mine not in asks and not store.check([mine.answer]):
            _change(store, lambda others: [*others, mine])  # somebody took it for gone
            asks = [*asks, mine]
        self._heard = {}
        for each in asks:
            word = store.get(each.alive) if store.check([each.alive]) else ""
            last = before.get(each.number, (word, -_SILENT_S))  # a first word may be old
            self._heard[each.number] = last if word == last[0] else (word, now_s)
        there = [
            each
            for each in sorted(asks, key=lambda each: each.number)
            if each == mine or now_s - self._heard[each.number][1] < _SILENT_S
        ]
        if there != self.there:
            self.there, self._since_s = there, now_s
        is_full = rendezvous.count_places(len(there)) <= 0
        is_time = is_full or now_s - self._since_s > LAST_CALL_S
        return is_time and len(there) >= min_workers and there[0] == mine


def list_asks(store: SignedStore) -> list[Ask]:
    """Return all asks without an answer."""
    return _read(store, store.plain.get(_ASKING)) if store.check([_ASKING]) else []


def list_ready(store: SignedStore, settings: int, members: Sequence[Member]) -> list[Ask]:
    """Return the asks of workers that are ready, and fit the members and their settings."""
    alike = [each for each in list_asks(store) if each.member.settings == settings]
    doubles = find_doubles(alike, members)
    return [each for each in alike if each not in doubles and store.check([each.ready])]


def find_doubles(asks: Sequence[Ask], members: Sequence[Member]) -> list[Ask]:
    """Find workers that have the number of a member, or of another one that asks.

    A store that has come back empty gives numbers anew until a member has restored it. Of two that
    ask, the one that has trained longer keeps the number.
    """
    known, doubles = {each.id: (each.host, each.pid) for each in members}, []
    for each in sorted(asks, key=lambda each: each.member.epoch, reverse=True):
        place = each.member.host, each.member.pid
        if known.setdefault(each.member.id, place) != place:
            doubles.append(each)
    return doubles


def answer(store: SignedStore, asks: Sequence[Ask], decision: dict[str, Any]) -> None:
    """Tell these workers the next epoch."""
    for each in asks:
        store.set(each.answer, json.dumps(decision))
    withdraw(store, asks)


def refuse(
    store: SignedStore, asks: Sequence[Ask], own: Member, doubles: Sequence[Ask] = ()
) -> None:
    """Refuse these workers: strangers, who do not suit this member, or those with another's number.

    Args:
        store: The store.
        asks: The workers.
        own: This member.
        doubles: Those among them that have another's number.
    """
    for each in asks:
        why, here, there = STRANGER, own.processes, each.member.processes
        if here != there:
            why = (
                f"each member of this crew has {name_processes(here)}, and this one "
                f"{name_processes(there)}; expected as many. Start it with --nproc-per-node {here}"
            )
        elif own.has_group != each.member.has_group:
            kinds = {True: "given as Crew(member=...)", False: "a process without a group"}
            why = (
                f"each member of this crew is {kinds[own.has_group]}, and this one is "
                f"{kinds[not own.has_group]}; start all in the same way"
            )
        elif each in doubles:
            why = (
                f"the number {each.member.id} of this worker is another one's: the store was "
                "started again, and gave the number anew before the members were back. Start it "
                "again, and it gets a new one"
            )
        store.set(each.answer, json.dumps({"refused": why}))
    withdraw(store, asks)


def name_processes(number: int) -> str:
    """Name a number of processes."""
    return f"{number} process" + ("" if number == 1 else "es")


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

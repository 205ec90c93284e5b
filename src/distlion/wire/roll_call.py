"""Roll calls: workers that wait for long ask all others whether they run, and where they are.

A worker that evaluates, saves or compiles is late, and still answers: its watch has a thread of its
own. One that is stopped or cut off does not.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlion.failures import name_ranks
from distlion.wire.finding import Answer, find_busy

logger = logging.getLogger("distlion")

BUSY_TIMEOUT_S = 1800.0
"""Seconds that torch waits in a collective of Gloo for a worker that is late."""


@dataclass(eq=False)
class RollCall:
    """One worker's question, and the answers to it.

    Attributes:
        asked_s: Time that is before all answers.
        number: Its number, which several workers' questions may share; None before it is asked.
        answers: The answer of each rank; None before all have answered.
    """

    asked_s: float
    number: int | None = None
    answers: Sequence[Answer] | None = None


class RollCalls:
    """The roll calls of a group, seen from one worker; the thread of its watch looks for them.

    Args:
        store: The process group's store.
        rank: This worker.
        world_size: Number of workers.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._last, self._looked_s = 0, time.monotonic()
        self._own: RollCall | None = None
        self._read: list[Answer] = []
        self._looking = threading.Lock()

    def begin_anew(self) -> None:
        """Note that the store was away, and may be another one, in which nobody has asked yet."""
        self._last = 0
        if self._own is not None and self._own.answers is None:
            self._own.number = None

    def ask(self, *, since_s: float) -> RollCall:
        """Return a question that all workers will be asked, no earlier than ``since_s``."""
        own = self._own
        if own is None or own.answers is not None or own.asked_s < since_s:
            self._own = own = RollCall(time.monotonic())
        return own

    def look(self, describe: Callable[[], Answer]) -> None:
        """Answer others, ask this worker's question, and read the answers to it.

        Args:
            describe: Function that reports on this worker.

        Notes:
            A second thread returns at once: the first one's look serves both. Two looks at a time
            would count one call twice, and wait for calls that nobody makes.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._look(describe)
        finally:
            self._looking.release()

    def _look(self, describe: Callable[[], Answer]) -> None:
        before, own, now_s = self._last, self._own, time.monotonic()
        while self._store.check([_name(self._last + 1)]):
            self._last += 1
        if own is not None and own.number is None:
            if self._last > before:
                own.asked_s = min(own.asked_s, self._looked_s)
            else:
                self._last += 1
                self._store.compare_set(_name(self._last), "", str(self._rank))
            own.number, self._read = self._last, []
        self._looked_s = now_s
        if self._last > before:
            self._store.set(_place(self._rank), json.dumps([self._last, *describe()]))
        if own is not None and own.answers is None:
            self._collect(own)

    def _collect(self, own: RollCall) -> None:
        """Read answers up to the first one that is missing."""
        assert own.number is not None
        while len(self._read) < self._world_size:
            place = _place(len(self._read))
            if not self._store.check([place]):
                return
            number, *answer = json.loads(self._store.get(place))
            if number < own.number:
                return
            self._read.append(Answer.parse(answer))
        own.answers = self._read


class Patience:
    """One wait for a transfer: how long it may still take, by what the other workers answer.

    Seconds of silence count as a failure, so each roll call that all have answered begins them
    anew, unless all have come to the exchange: from the arrival of the last one on, nothing is left
    to wait for but the network.

    Args:
        call_roll: Function that asks all workers, where the wait began at a time.
        start_s: When it began.
        limit_s: Seconds of silence that count as a failure.
        busy_limit_s: Seconds that workers are waited for which run, but are elsewhere.
        rank: This worker.
        call: The call that waits, in words.
    """

    def __init__(
        self,
        call_roll: Callable[..., RollCall],
        *,
        start_s: float,
        limit_s: float,
        busy_limit_s: float,
        rank: int,
        call: str,
    ) -> None:
        self._call_roll, self._start_s = call_roll, start_s
        self._limit_s, self._busy_limit_s = limit_s, busy_limit_s
        self._rank, self._waiting_call = rank, call
        self._deadline_s = start_s + limit_s
        self._ask_s = start_s + limit_s / 2
        self._call: RollCall | None = None
        self._has_told = False

    def find_deadline(self, optimizer: int | None) -> float:
        """Return the time at which the wait ends, as far as is known now.

        Args:
            optimizer: The optimizer whose call waits; None for another call.
        """
        now_s = time.monotonic()
        if self._call is None and now_s >= self._ask_s:
            self._call = self._call_roll(since_s=self._start_s)
        call = self._call
        if call is not None and call.answers is not None:
            self._call, self._ask_s = None, call.asked_s + self._limit_s / 2
            self._judge(call.asked_s, call.answers, optimizer)
        return self._deadline_s

    def _judge(self, asked_s: float, answers: Sequence[Answer], optimizer: int | None) -> None:
        busy = find_busy(answers, optimizer=optimizer)
        if busy is None:
            return
        waited_s = 0.0 if busy else min(each.waited_s or 0.0 for each in answers)
        last_s = self._start_s + self._busy_limit_s
        until_s = min(asked_s - waited_s + self._limit_s, last_s)
        self._deadline_s = max(self._deadline_s, until_s)
        if busy and asked_s >= self._start_s + self._limit_s:
            self._tell(busy, answers)

    def _tell(self, busy: Sequence[int], answers: Sequence[Answer]) -> None:
        """Log the wait once, on the first of the workers that wait."""
        waiting = [rank for rank, each in enumerate(answers) if each.is_waiting]
        if self._has_told or not waiting or waiting[0] != self._rank:
            return
        self._has_told = True
        logger.warning(
            "[rank %d] %s has waited for more than %g s for %s, busy elsewhere. Every rank must "
            "make this call. The wait ends with an error after %g s",
            self._rank,
            self._waiting_call,
            self._limit_s,
            name_ranks(busy),
            self._busy_limit_s,
        )


def _name(number: int) -> str:
    return f"distlion/roll/{number}"


def _place(rank: int) -> str:
    return f"distlion/present/{rank}"

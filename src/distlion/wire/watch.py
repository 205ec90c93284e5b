"""The watch for failures: workers agree over the group's store on the ranks that failed.

A transport reports that some connection closed or stayed silent, not whose fault it was. So the
first worker that fails raises an alarm in the store through which the group met. Every worker that
still runs answers, and all name the same ranks: the ones that do not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from distlion.errors import ProcessGroupError
from distlion.failures import FailureKind, name_ranks
from distlion.wire.background import run_in_background
from distlion.wire.finding import Answer, Finding, conclude
from distlion.wire.groups import is_apart, store_of
from distlion.wire.heartbeats import Heartbeats
from distlion.wire.roll_call import RollCall, RollCalls
from distlion.wire.turns import LONG_S, Turns

POLL_S = 0.2
POLL_AFTER_ALARM_S = 0.05
# Where there are heartbeats, of a worker that waits.
POLL_FOR_HEARTBEATS_S = 0.1
ANSWER_S = 0.6
# A failed worker waits this long for answers; a worker that looked later has seen its alarm.
CALM_S = ANSWER_S
READ_S = 0.2
# An error comes at most a second after the timeout, even if the store does not answer.
SETTLE_S = 0.9
FINDING = "distlion/finding"
LEFT = "distlion/left"

_Answer = TypeVar("_Answer")


class PeerWatch:
    """One worker's part in finding the ranks that failed; one for each process group.

    A daemon thread looks for an alarm every 0.2 s, so that a worker that computes answers too.

    Args:
        process_group: The workers.
        store_is_apart: Whether none of them keeps the store, so that it may come back after a loss.
        heartbeats: The heartbeats of the other workers; None if they send none.

    Attributes:
        rank: This worker's rank in the group.
        turns: This worker's turns: its present call and optimizer.
        alarmed: Event that is set once some worker has failed.
        has_settled: Whether a transfer of this worker has failed.
        is_one_of_several: Whether it is a process of a crew's member of several, which have to know
            if it gives up.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        store_is_apart: bool = False,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self.rank, self._world_size = process_group.rank(), process_group.size()
        self._group = weakref.ref(process_group)
        self._store = store_of(process_group)
        self.turns = Turns(self._store)
        self._roll_calls = RollCalls(self._store, self.rank, self._world_size)
        # No other group has the same ranks as one that torch does not know.
        self._ranks, self._name = list[int](), "the group of a crew"
        if not is_apart(process_group):
            self._ranks = dist.get_process_group_ranks(process_group)
            self._name = f"process group {process_group.group_name}"
        self.has_settled, self._settled_s = False, 0.0
        self.is_one_of_several = False
        self._store_host = None if store_is_apart else _find_store_host(process_group, self._store)
        self._heartbeats, self._silent = heartbeats, tuple[int, ...]()
        self.alarmed = threading.Event()
        # Transfers with a waiting thread: several optimizers with overlap have several threads.
        self._waiting: set[object] = set()
        # Times when this worker entered the last exchange but one, and the last one.
        self._entered_s = [time.monotonic()] * 2
        self._looked_s = time.monotonic()
        self._is_store_gone = self._has_host_left_first = False
        self._finding: Finding | None = None
        self._may_return = store_is_apart
        self._owed: FailureKind | None = None
        self._start()

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that all have agreed to be lost, as far as this worker has heard."""
        return () if self._finding is None else self._finding.culprits

    def find_pause_s(self) -> float:
        """Return the seconds until the next look."""
        if self.alarmed.is_set():
            return POLL_AFTER_ALARM_S
        hears = self._waiting and self._heartbeats is not None
        return POLL_FOR_HEARTBEATS_S if hears else POLL_S

    def _start(self) -> None:
        """Start the thread that looks."""
        self._ended = threading.Event()
        listen = partial(_listen, weakref.ref(self), self._ended)
        run_in_background(listen, self._ended, "distlion watch")
        weakref.finalize(self, self._ended.set)

    def look(self) -> bool:
        """Look for an alarm, and answer it; return whether to look again."""
        try:
            return self._look()
        except RuntimeError:  # perhaps after it has seen that there is no alarm
            self._note_store_gone()
            raise

    def _look(self) -> bool:
        if self._owed is not None:
            self._raise_alarm(self._owed)
            return False
        is_alarmed = self._store.check(["distlion/alarm"])
        self._looked_s = time.monotonic()
        if self._is_store_gone:
            self._is_store_gone = self._has_host_left_first = False
        if not is_alarmed and self._waiting:
            is_alarmed = self._hears_silence()
        if not is_alarmed and self._waits_for_long():
            is_alarmed = self._waits_in_vain()
        if not is_alarmed:
            self._roll_calls.look(self._describe)
            return True
        if not self.alarmed.is_set():
            self._answer()
            self.alarmed.set()
        if not self._store.check([FINDING]):
            return True
        # The store's host may leave before this worker needs the finding.
        found = self._read_finding()
        for twin in [] if self._waiting else self._list_twins():
            twin._take_over(found)
        return False

    def leave(self, turn: int, why: str) -> None:
        """Tell the others, which may wait now or later, that this worker joins no more calls.

        Args:
            turn: The number of the first call that it does not complete. Others may still complete
                an earlier call, as this worker's data for it are under way.
            why: The cause, in words.
        """
        left = json.dumps({"rank": self.rank, "turn": turn, "why": why})
        with contextlib.suppress(RuntimeError):
            within(SETTLE_S, lambda: self._store.compare_set(LEFT, "", left))

    def is_left_out(self, own: Collection[int]) -> bool:
        """Return whether the others have lost this worker because it left; takes a second at most.

        Args:
            own: The ranks that act as this worker.
        """
        until_s = time.monotonic() + SETTLE_S
        while self.alarmed.is_set() and self._finding is None and time.monotonic() < until_s:
            time.sleep(0.02)
        if self._finding is None or self._finding.kind != "left":
            return False
        with contextlib.suppress(RuntimeError):  # the store may be away
            return json.loads(self._store.get(LEFT))["rank"] in own
        return False

    def _hears_silence(self) -> bool:
        """Raise the alarm if another worker has sent no heartbeat for too long."""
        self._silent = () if self._heartbeats is None else self._heartbeats.find_silent()
        if self._silent:
            self._raise_alarm("silent")
        return bool(self._silent)

    def _waits_in_vain(self) -> bool:
        """Raise the alarm if another worker will not come to this worker's call."""
        if self.read_left() is not None:
            self._raise_alarm("left")
        elif self.turns.differ():
            self._raise_alarm("order")
        else:
            return False
        return True

    def read_left(self) -> dict[str, Any] | None:
        """Read which worker has left, unless it has completed this worker's call."""
        if not self._store.check([LEFT]):
            return None
        left: dict[str, Any] = json.loads(self._store.get(LEFT))
        return left if left["turn"] <= self.turns.now.number else None

    def _list_twins(self) -> list[PeerWatch]:
        """List this process's watches for other groups of the same ranks."""
        others = [watch for watch in list(_watches.values()) if watch._name != self._name]
        return [watch for watch in others if watch._ranks == self._ranks]

    def _find_stray(self) -> str | None:
        """Name a call on a twin at which this worker waits, or failed since its last call here."""
        for twin in self._list_twins():
            if twin._waiting or twin._settled_s > self._entered_s[1]:
                return f"{twin.turns.now} of {twin._name}"
        return None

    def _take_over(self, finding: Finding) -> None:
        """Tell workers that wait here that calls on a twin are out of order."""
        if finding.kind == "order" and self._waiting:
            self._store.compare_set(FINDING, "", json.dumps(asdict(finding)))
            self._raise_alarm("order")

    def _note_store_gone(self) -> None:
        """Note that the store is gone, and whether its host was the first to leave."""
        if not self._is_store_gone:
            # A worker that was not stopped would have seen an alarm before the store's host left.
            self._has_host_left_first = time.monotonic() - self._looked_s < CALM_S
            self._is_store_gone = True

    def go_on_without_store(self) -> bool:
        """Return whether to look again, although the store is gone: it may come back, and empty."""
        if self._may_return:
            self._roll_calls.begin_anew()
            if self._heartbeats is not None:
                self._heartbeats.begin_anew()
        return self._may_return

    def _read_finding(self) -> Finding:
        found = json.loads(self._store.get(FINDING))
        # First, as the store's host may leave at any time from here on.
        self._finding = Finding.parse(found)
        self._store.set(f"distlion/read/{self.rank}", "")
        return self._finding

    def enter_exchange(self, transfer: object) -> None:
        """Note that this worker has come to an exchange, and waits for a transfer."""
        self._waiting.add(transfer)
        self._entered_s = [self._entered_s[1], time.monotonic()]

    def leave_exchange(self, transfer: object) -> None:
        """Note that this worker no longer waits for a transfer."""
        self._waiting.discard(transfer)

    def _waits_for_long(self) -> bool:
        return bool(self._waiting) and time.monotonic() - self._entered_s[1] > LONG_S

    def has_failed(self, among: Collection[int] | None = None) -> bool:
        """Return whether an exchange of this worker cannot end, because some worker has failed.

        Args:
            among: The members of the exchange, where it ends whatever happens to others: they act
                as one worker, so that all of them must know its end. It cannot end if one of them
                is lost, or gave up before it. None: a failure of any worker ends it.
        """
        if among is None or not self.alarmed.is_set():
            return self.alarmed.is_set()
        with contextlib.suppress(RuntimeError):
            if any(self._store.check([_name_end(rank)]) for rank in among if rank != self.rank):
                return True
            if not self._store.check([FINDING]):
                return False
            return bool({*self._read_finding().culprits} & {*among})
        return True  # nobody can be asked

    def is_given_up(self, limit_s: float, among: Collection[int] | None = None) -> bool:
        """Return whether others may have given this worker up before its exchange ended.

        Others begin to wait for it once it has entered the previous exchange. So the store is asked
        only if that was at least half of their patience ago, as after a stop or a slow step. Where
        there are heartbeats, that is ``silence_s``. On a slow link the store's answer comes behind
        the votes of other workers; it has ``limit_s``, as they had.

        Args:
            limit_s: The patience of others.
            among: As for ``has_failed``.
        """
        away_s = time.monotonic() - self._entered_s[0]
        patience_s = limit_s
        if self._heartbeats is not None:
            patience_s = min(limit_s, self._heartbeats.silence_s)
        if away_s < patience_s / 2 or self._has_host_left_first:
            return False
        heard = None
        with contextlib.suppress(RuntimeError):
            heard = self.alarmed.is_set() or within(limit_s, self.look)
        unknown = heard is None and not self._has_host_left_first
        if not self.alarmed.is_set() and not (unknown and away_s >= limit_s):
            return False
        return among is None or self.has_failed(among)

    def agree_on_failure(self, kind: FailureKind) -> Finding:
        """Agree on the failure with all workers that answer; takes a second at most."""
        # The listening thread has no more to answer, and c10d would print that the store is gone.
        self._ended.set()
        self.has_settled, self._settled_s = True, time.monotonic()
        if self.is_one_of_several:
            with contextlib.suppress(RuntimeError):
                within(SETTLE_S, lambda: self._store.set(_name_end(self.rank), ""))
        try:
            within(SETTLE_S, lambda: self._settle(kind))
        except RuntimeError:
            self._note_store_gone()
            # Once all have agreed, the store's host may leave.
            if self._finding is None:
                self._owe_alarm(kind)
                return self._blame_store(kind)
        if self._finding is None:
            self._owe_alarm(kind)
        return self._finding or Finding(
            kind,
            note="the store through which the group met does not answer either, so that this "
            "worker may itself be cut off",
        )

    def _owe_alarm(self, kind: FailureKind) -> None:
        """Raise the alarm once the store is back, as others may still wait for this worker."""
        if self._may_return:
            self._owed = kind
            self._start()

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Agree on the failure with all workers before an error to connect is raised.

        Others may have connected, and wait at their first step. They would blame this worker, which
        may keep the store.

        Raises:
            ProcessGroupError: That of the block, with the ranks that do not answer.
        """
        try:
            yield
        except ProcessGroupError as error:
            found = self.agree_on_failure("silent")
            if found.culprits and not found.busy:
                note = f"{name_ranks(found.culprits)} did not answer"
                raise ProcessGroupError(f"{error} ({note})") from None
            raise

    def _blame_store(self, kind: FailureKind) -> Finding:
        """Blame the host of the store, which is gone, if the host was the first to leave."""
        host = self._store_host
        if host is None or host == self.rank:
            return Finding(kind, note="the store through which the group met is gone too")
        if self._has_host_left_first:
            note = "it kept the store through which the group met, and that is gone too"
            return Finding(kind, (host,), note=note)
        return Finding(
            kind,
            note="the store through which the group met is gone too, and this worker was held "
            f"up for so long that rank {host}, which kept it, may have left after somebody "
            "else had failed; look at the logs of the others",
        )

    def _settle(self, kind: FailureKind) -> None:
        """1 raise the alarm, 2 wait for answers, 3 publish the finding, 4 let others read it.

        The listening thread may have read a finding before; 4 is for the others all the same.
        """
        finding, everybody = self._finding, range(self._world_size)
        if finding is None:
            finding = self._find(kind, everybody)

        # 4 let others read it: this worker may keep the store
        present = [rank for rank in everybody if rank not in finding.culprits]
        self._await("read", present, READ_S)

    def _find(self, kind: FailureKind, everybody: range) -> Finding:
        # 1 raise the alarm
        self._raise_alarm(kind)

        # 2 wait for answers
        self._await(
            "answer",
            [rank for rank in everybody if rank not in self._silent],
            ANSWER_S,
            unless=FINDING,
        )

        # 3 publish the finding; the first one counts
        if not self._store.check([FINDING]):
            found = json.dumps(asdict(self._conclude(kind)))
            self._store.compare_set(FINDING, "", found)
        return self._read_finding()

    def _raise_alarm(self, kind: FailureKind) -> None:
        self._answer()
        self._store.set("distlion/alarm", kind)
        self.alarmed.set()

    def _answer(self) -> None:
        self._store.set(f"distlion/answer/{self.rank}", json.dumps(self._describe()))

    def _describe(self) -> Answer:
        group = self._group()
        is_member = group is not None and is_registered(group)
        alive = sorted(self.turns.alive) if is_member else []
        waited_s = time.monotonic() - self._entered_s[1] if self._waiting else None
        return Answer(waited_s, self.turns.now, alive, self._find_stray())

    def _await(self, what: str, ranks: Any, limit_s: float, *, unless: str | None = None) -> None:
        """Wait for a key of each rank, or for the key that makes them unnecessary."""
        deadline_s = time.monotonic() + limit_s
        keys = [f"distlion/{what}/{rank}" for rank in ranks]
        while time.monotonic() < deadline_s and not self._store.check(keys):
            self._looked_s = time.monotonic()
            # Its publisher may host the store, and not wait for workers that fail later.
            if unless is not None and self._store.check([unless]):
                return
            time.sleep(0.02)

    def _conclude(self, kind: FailureKind) -> Finding:
        """Draw a finding from the answers."""
        keys = [f"distlion/answer/{rank}" for rank in range(self._world_size)]
        answers = [self._read_answer(key) if self._store.check([key]) else None for key in keys]
        found = conclude(
            kind, answers, optimizer=self.optimizer, left=self.read_left(), group=self._name
        )
        if self._heartbeats is None or not self._silent or found.kind != "silent":
            return found
        note = f"no heartbeat for {self._heartbeats.silence_s:g} s, the silence_s= of the crew"
        return replace(found, note=note)

    def _read_answer(self, key: str) -> Answer:
        return Answer.parse(json.loads(self._store.get(key)))

    @property
    def optimizer(self) -> int | None:
        """Number of the optimizer of this worker's call; None if it has freed it."""
        own = self.turns.now.optimizer
        return own if own in self.turns.alive else None

    def call_roll(self, *, since_s: float) -> RollCall:
        """Ask all workers where they are; the answers come later.

        Args:
            since_s: Earliest time of the question.
        """
        return self._roll_calls.ask(since_s=since_s)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerWatch] = weakref.WeakKeyDictionary()


def watch_peers(
    process_group: dist.ProcessGroup,
    *,
    store_is_apart: bool = False,
    heartbeats: Heartbeats | None = None,
) -> PeerWatch:
    """Return the watch of a group, and start it on the first call."""
    if process_group not in _watches:
        _watches[process_group] = PeerWatch(
            process_group, store_is_apart=store_is_apart, heartbeats=heartbeats
        )
    return _watches[process_group]


def _name_end(rank: int) -> str:
    return f"distlion/gave up/{rank}"


def is_registered(process_group: dist.ProcessGroup) -> bool:
    """Return whether torch, or distlion for a group apart, still knows a group."""
    try:
        return dist.get_rank(process_group) >= 0
    except (ValueError, RuntimeError):
        return is_apart(process_group)


def _find_store_host(process_group: dist.ProcessGroup, store: Any) -> int | None:
    """Find the rank in the group that keeps the store; None where no worker is known to."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if type(store).__name__ != "TCPStore" or kept_by_agent:
        return None
    ranks = dist.get_process_group_ranks(process_group)
    return ranks.index(0) if 0 in ranks else None


def _listen(watch: weakref.ref[PeerWatch], ended: threading.Event) -> None:
    poll_s = POLL_S
    while not ended.wait(poll_s):
        found = watch()
        try:
            if found is None or not found.look():
                return
        except RuntimeError:
            if found is None or not found.go_on_without_store():
                return  # nobody can answer through it any more
        poll_s = found.find_pause_s()
        del found


def within(limit_s: float, function: Callable[[], _Answer]) -> _Answer | None:
    """Return the result of ``function``, or raise its error; None if it takes longer.

    A store whose host is silent may block for minutes. None too where no thread can start.
    """
    answer: Future[_Answer] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except RuntimeError as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=call, name="distlion finding", daemon=True).start()
    except RuntimeError:  # it is no error of the function's
        return None
    try:
        return answer.result(limit_s)
    except FutureTimeoutError:
        return None

"""Who failed: workers that lost a peer agree over the group's rendezvous store on whom to name.

A transport tells that some connection closed or stayed silent, not whose fault it was. So the first
worker that fails raises an alarm in the store through which the group met; every worker that still
runs answers; and those that do not answer are named, by all the others alike.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist

POLL_S = 0.2
POLL_AFTER_ALARM_S = 0.05
ANSWER_S = 0.6
READ_S = 0.2
# An error comes at most a second after the timeout, also where the store does not answer.
SETTLE_S = 0.9
CALM_S = 1.0

FailureKind = Literal["lost", "silent"]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Finding:
    """What the workers agreed on.

    Attributes:
        kind: "lost", a connection closed; "silent", somebody did not answer in time.
        culprits: Ranks in the group; empty where that is unknown.
        busy: Whether the culprits do run, but did not come to the exchange.
        note: What else is known, for the message.
    """

    kind: FailureKind
    culprits: tuple[int, ...] = ()
    busy: bool = False
    note: str = ""


class PeerWatch:
    """One worker's part in finding out who failed; one for each process group.

    A daemon thread looks for an alarm every 0.2 s, so that a worker that computes answers too.

    Args:
        process_group: The workers.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._store = _store_of(process_group)
        self._store_host = _find_store_host(process_group, self._store)
        self._ended = threading.Event()
        self.alarmed = threading.Event()
        self.in_exchange = False
        # When this worker entered the last exchange but one, and the last one.
        self._entered_s = [time.monotonic()] * 2
        self._looked_s = time.monotonic()
        self._is_store_gone = False
        self._finding: Finding | None = None
        thread = threading.Thread(
            target=_listen,
            args=(weakref.ref(self), self._ended),
            name="distlion watch",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, self._ended.set)
        # A thread that asks the store while the interpreter is wound up would abort it.
        atexit.register(_end, self._ended, thread)

    def look(self) -> bool:
        """Look for an alarm, and answer it; return whether to look again."""
        try:
            is_alarmed = self._store.check(["distlion/alarm"])
        except RuntimeError:
            # Who was not stopped would have seen an alarm before the store's host left.
            self._is_store_gone = time.monotonic() - self._looked_s < CALM_S
            raise
        self._looked_s = time.monotonic()
        if not is_alarmed:
            return True
        if not self.alarmed.is_set():
            self._answer()
            self.alarmed.set()
        if not self._store.check(["distlion/finding"]):
            return True
        # Whoever keeps the store may leave before this worker needs to know.
        self._finding = self._read_finding()
        return False

    def _read_finding(self) -> Finding:
        found = json.loads(self._store.get("distlion/finding"))
        self._store.set(f"distlion/read/{self._rank}", "")
        return Finding(found["kind"], tuple(found["culprits"]), found["busy"])

    def enter_exchange(self) -> None:
        """Note that this worker has come to an exchange."""
        self.in_exchange = True
        self._entered_s = [self._entered_s[1], time.monotonic()]

    def is_given_up(self, limit_s: float) -> bool:
        """Return whether others may have given this worker up before its exchange came to an end.

        Others begin to wait for it once it has entered the exchange before; so the store is asked
        only if that was ``limit_s`` ago, or half of it: it was stopped, or slow.
        """
        away_s = time.monotonic() - self._entered_s[0]
        if away_s < limit_s / 2 or self._is_store_gone:
            return False
        heard = None
        with contextlib.suppress(RuntimeError):
            heard = self.alarmed.is_set() or _within(ANSWER_S, self.look)
        unknown = heard is None and not self._is_store_gone
        return self.alarmed.is_set() or (unknown and away_s >= limit_s)

    def settle(self, kind: FailureKind) -> Finding:
        """Agree with all workers that answer on who failed; takes a second at most."""
        # The thread that listens has no more to answer, and c10d would print a store that is gone.
        self._ended.set()
        if self._finding is not None:
            return self._finding
        try:
            found = _within(SETTLE_S, lambda: self._settle(kind))
        except RuntimeError:
            if self._store_host is not None and self._store_host != self._rank:
                note = "it kept the store through which the group met, and that is gone too"
                return Finding(kind, (self._store_host,), note=note)
            return Finding(kind, note="the store through which the group met is gone too")
        return found or Finding(
            kind,
            note="the store through which the group met does not answer either, so that this "
            "worker may itself be cut off",
        )

    def _settle(self, kind: FailureKind) -> Finding:
        """1 raise the alarm, 2 wait for answers, 3 publish the finding, 4 let others read it."""
        # 1 raise the alarm
        self._answer()
        self._store.set("distlion/alarm", kind)
        self.alarmed.set()

        # 2 wait for answers
        everybody = range(self._world_size)
        self._await("answer", everybody, ANSWER_S)

        # 3 publish the finding; the first one stands
        if not self._store.check(["distlion/finding"]):
            found = json.dumps(self._conclude(kind))
            self._store.compare_set("distlion/finding", "", found)
        finding = self._read_finding()

        # 4 let others read it: this worker may keep the store
        present = [rank for rank in everybody if rank not in finding.culprits]
        self._await("read", present, READ_S)
        return finding

    def _answer(self) -> None:
        where = "exchange" if self.in_exchange else "elsewhere"
        self._store.set(f"distlion/answer/{self._rank}", where)

    def _await(self, what: str, ranks: Any, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        keys = [f"distlion/{what}/{rank}" for rank in ranks]
        while time.monotonic() < deadline_s and not self._store.check(keys):
            time.sleep(0.02)

    def _conclude(self, kind: FailureKind) -> dict[str, Any]:
        heard: dict[int, bool] = {}
        for rank in range(self._world_size):
            key = f"distlion/answer/{rank}"
            if self._store.check([key]):
                heard[rank] = self._store.get(key) == b"exchange"
        culprits = [rank for rank in range(self._world_size) if rank not in heard]
        busy = kind == "silent" and not culprits
        if busy:
            culprits = [rank for rank, in_exchange in heard.items() if not in_exchange]
        return {"kind": kind, "culprits": culprits, "busy": busy}


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerWatch] = weakref.WeakKeyDictionary()


def watch_peers(process_group: dist.ProcessGroup) -> PeerWatch:
    """Return the watch of a group, which is started when first asked for."""
    if process_group not in _watches:
        _watches[process_group] = PeerWatch(process_group)
    return _watches[process_group]


def keep_forever(process_group: dist.ProcessGroup) -> None:
    """Never destroy a group: after a failure, its destructor waits for peers that may be silent.

    Gloo cannot abort a collective, so that an interpreter would not come to its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def _store_of(process_group: dist.ProcessGroup) -> Any:
    # Public since torch 2.13 or so; the older way is private, and the same.
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(process_group)


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
        if found is None:
            return
        try:
            if not found.look():
                return
        except RuntimeError:  # the store is gone: nobody can answer through it any more
            return
        poll_s = POLL_AFTER_ALARM_S if found.alarmed.is_set() else POLL_S
        del found


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    thread.join(1.0)


def _within(limit_s: float, function: Callable[[], _Answer]) -> _Answer | None:
    """Return what ``function`` returns, or raise what it raises; None if it needs longer.

    A store whose host is silent may block for minutes.
    """
    answer: Future[_Answer] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="distlion finding", daemon=True).start()
    try:
        return answer.result(limit_s)
    except FutureTimeoutError:
        return None

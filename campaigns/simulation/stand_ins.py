"""What stands in, within the package, for modules that reach outside of a worker."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import datetime as dt
import os
import queue
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cache
from importlib.metadata import version
from secrets import token_hex
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

import simulation.distributed as distributed_module
from distlion.crew import Crew
from distlion.crew.lifeline import Connections
from distlion.crew.side_link import Listener, dial
from distlion.wire import gloo
from distlion.wire.groups import drop_store, keep
from distlion.wire.tcp import WIRE_VARIABLE
from simulation.kernel import Kernel, Killed, Task, running

SIMULATED = (
    "distlion.wire",
    "distlion.step",
    "distlion.peers",
    Crew.__module__.rpartition(".")[0],
)
"""The packages whose modules see the stand-ins; what else they import is what it is."""


class _Waitable:
    """Something that tasks wait for."""

    def __init__(self) -> None:
        self._kernel: Kernel = running()
        self._waiting: list[Task] = []

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float | None) -> bool:
        kernel = self._kernel
        if kernel.is_over:  # a finalizer, of what outlived its schedule
            return is_true()
        deadline_s = None if timeout_s is None else kernel.now_s + timeout_s
        kernel.check_alive()
        while not is_true():
            if deadline_s is not None and kernel.now_s >= deadline_s:
                return False
            self._waiting.append(kernel.current)
            kernel.wait(deadline_s)
        return True

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._kernel.wake(task)


class Event(_Waitable):
    """``threading.Event``."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._notify()

    def wait(self, timeout: float | None = None) -> bool:
        return self._wait_for(self.is_set, timeout)


class Thread(_Waitable):
    """``threading.Thread``, which belongs to the process that makes it."""

    def __init__(
        self, *, target: Callable[..., None], args: Any = (), name: str = "", daemon: bool = False
    ) -> None:
        super().__init__()
        self._target, self._args, self._name = target, args, name
        self._has_ended = False

    def start(self) -> None:
        kernel = self._kernel

        def run() -> None:
            target, args = self._target, self._args
            del self._target, self._args
            try:
                target(*args)
            finally:
                self._has_ended = True
                self._notify()

        kernel.spawn(kernel.current.process, self._name, run)

    def join(self, timeout: float | None = None) -> None:
        # A process that is killed lets go of what waits for its threads.
        with contextlib.suppress(Killed):
            if not self._kernel.current.process.is_gone:
                self._wait_for(lambda: self._has_ended, timeout)


class Lock(_Waitable):
    """``threading.Lock``, of which the holder may wait."""

    def __init__(self) -> None:
        super().__init__()
        self._is_held = False

    def __enter__(self) -> None:
        self._wait_for(lambda: not self._is_held, None)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, *, blocking: bool) -> bool:
        assert not blocking, "only __enter__ waits"
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._notify()


class Future(_Waitable):
    """``concurrent.futures.Future``."""

    def __init__(self) -> None:
        super().__init__()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def __class_getitem__(cls, item: object) -> type[Future]:
        return cls

    def done(self) -> bool:
        """Return whether there is a result or an error; where there is one, others are ignored."""
        return self._outcome is not None

    def set_result(self, result: Any) -> None:
        self._outcome = (result, None)
        self._notify()

    def set_exception(self, error: BaseException) -> None:
        self._outcome = (None, error)
        self._notify()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._await_outcome(timeout)[1]

    def result(self, timeout: float | None = None) -> Any:
        result, error = self._await_outcome(timeout)
        if error is not None:
            raise error
        return result

    def _await_outcome(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        if not self._wait_for(lambda: self._outcome is not None, timeout):
            raise FutureTimeoutError
        assert self._outcome is not None
        return self._outcome


class SimpleQueue(_Waitable):
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._notify()

    def get(self) -> Any:
        self._wait_for(lambda: bool(self._items), None)
        return self._items.popleft()


def _register_at_exit(function: Callable[[], Any]) -> Callable[[], Any]:
    running().current.process.at_exit.append(function)
    return function


def _unregister_at_exit(function: Callable[[], Any]) -> None:
    functions = running().current.process.at_exit
    if function in functions:
        functions.remove(function)


class _Os:
    """``os``, in which each worker is a process of its own, on a host of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        return 1000 + int(getattr(running().current.process, "rank", 0))

    def uname(self) -> SimpleNamespace:
        return SimpleNamespace(nodename=running().current.process.name)


def _draw_token(n_bytes: int) -> str:
    """Return a token; what is drawn for the schedule goes on as it would."""
    kernel = running()
    return f"{kernel.current.process.name} {kernel.now_s:.9f}"


def _draw(low: float, high: float) -> float:
    return running().random.uniform(low, high)


TIME = SimpleNamespace(
    monotonic=lambda: running().now_s,
    perf_counter_ns=lambda: int(running().now_s * 1e9),
    sleep=lambda seconds: running().sleep(seconds),
)


def _is_main_alive() -> bool:
    return any(task.name == "main" for task in running().current.process.tasks)


# A worker trains on its main thread.
MAIN_THREAD = SimpleNamespace(is_alive=_is_main_alive)
THREADING = SimpleNamespace(
    Event=Event,
    Thread=Thread,
    Lock=Lock,
    get_ident=lambda: id(running().current),
    main_thread=lambda: MAIN_THREAD,
    current_thread=lambda: MAIN_THREAD,
)
BEGINNING = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
# The clocks of two machines differ.
DATETIME = SimpleNamespace(
    now=lambda zone: BEGINNING + dt.timedelta(seconds=running().now_s + _find_skew_s())
)
RANDOM = SimpleNamespace(uniform=_draw)
QUEUE = SimpleNamespace(SimpleQueue=SimpleQueue)
ATEXIT = SimpleNamespace(register=_register_at_exit, unregister=_unregister_at_exit)


def _find_skew_s() -> float:
    return float(getattr(running().current.process, "clock_skew_s", 0.0))


@cache
def _version(name: str) -> str:
    """``importlib.metadata.version``, which parses a file each time."""
    return version(name)


class _Connections(Connections):
    """``Connections``: a simulated connection breaks by itself where the store is silent."""

    can_be_cut = True  # type: ignore[assignment]

    def _open(self) -> Any:
        return self._connect()

    def make(self, restore: Callable[[Any], None] = lambda store: None) -> None:
        """Connect; moments of faults are not counted by what the lifeline asks."""
        super().make(restore)
        if self.asked.made is not None:
            self.asked.made.counts = False


@cache
def _find_places() -> list[tuple[ModuleType, str, str]]:
    """List what is to be replaced: a module, its name for something, and what that is."""
    wanted = {
        id(dist): "distributed",
        id(ProcessGroupGloo): "ProcessGroupGloo",
        id(PrefixStore): "PrefixStore",
        id(time): "time",
        id(threading): "threading",
        id(queue): "queue",
        id(atexit): "atexit",
        id(concurrent.futures.Future): "Future",
        id(version): "version",
        id(keep): "keep",
        id(drop_store): "drop_store",
        id(threading.Event): "Event",
        id(threading.Thread): "Thread",
        id(dt.datetime): "datetime",
        id(random): "random",
        id(Connections): "Connections",
        id(token_hex): "token_hex",
        id(os): "os",
        id(Listener): "Listener",
        id(dial): "dial",
        id(socket): "socket",
    }
    return [
        (module, attribute, wanted[id(value)])
        for name, module in sorted(sys.modules.items())
        if name.startswith(SIMULATED)
        for attribute, value in vars(module).items()
        if id(value) in wanted
    ]


@contextlib.contextmanager
def installed(distributed: Any) -> Iterator[None]:
    """Let the package see the stand-ins.

    They are put where a module names what it imported, so that nothing in the package knows of
    them, and a module that begins to use one of these is simulated at once. What a stand-in does
    not have, the package does not use yet: that fails with its name. Votes travel over groups of
    Gloo, as the C++ code of own sockets has no stand-in.

    Args:
        distributed: What stands in for ``torch.distributed``.
    """
    stand_ins = {
        "distributed": distributed,
        "ProcessGroupGloo": distributed.make_group,
        "PrefixStore": distributed_module.PrefixStore,
        "time": TIME,
        "threading": THREADING,
        "queue": QUEUE,
        "atexit": ATEXIT,
        "Future": Future,
        "version": _version,
        # It would keep every schedule in memory.
        "keep": distributed.keep_forever,
        "drop_store": distributed.drop_store,
        "Event": Event,
        "Thread": Thread,
        "datetime": DATETIME,
        "random": RANDOM,
        "Connections": _Connections,
        "token_hex": _draw_token,
        "os": _Os(),
        "Listener": getattr(distributed, "listen", None),
        "dial": getattr(distributed, "dial", None),
        "socket": SimpleNamespace(
            gethostname=lambda: running().current.process.name,
            create_connection=getattr(distributed, "create_connection", None),
        ),
    }
    before = [(module, name, getattr(module, name)) for module, name, _ in _find_places()]
    try:
        for module, name, what in _find_places():
            setattr(module, name, stand_ins[what])
        with mock.patch.dict(os.environ, {WIRE_VARIABLE: "gloo"}):
            yield
    finally:
        gloo._under_way.clear()
        for module, name, value in before:
            setattr(module, name, value)

"""A worker's lifeline to the store: it sends heartbeats, and connects again after a loss.

    connected ──no answer──► cut ──tries──► connected anew ──what the run needs is there──► in use

torch would wait for a silent store forever, so connections are cut. Until a store is back, each
request fails at once. What needs the store waits for it (``Rendezvous.await_back``), and everything
else goes on.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError

from distlion.errors import CrewError
from distlion.wire.background import run_in_background
from distlion.wire.heartbeats import BEAT_S, beat

logger = logging.getLogger("distlion")

_OPEN_FILES = "/dev/fd"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_TRY_S = 0.5
"""Seconds before each attempt to connect again, longer than anybody looks into the store for: so
all who do have seen that it was away."""


class Pulse:
    """The heartbeats of a worker; the thread of its lifeline sends them.

    A thread sends them, and no process of its own, so that what stops the worker stops them too.
    They also end with the thread that trains: in a process whose main thread has failed, others may
    run on for long.
    """

    def __init__(self) -> None:
        self._place: tuple[Any, int] | None = None
        self._inside: tuple[Any, int] | None = None
        self._trainer = threading.current_thread()
        self._number = 0

    def begin(self, store: Any, rank: int) -> None:
        """Send heartbeats from now on; the thread that calls this trains.

        Args:
            store: The store of an epoch, over the connection of the lifeline.
            rank: This member's place in the epoch.
        """
        self._trainer, self._place = threading.current_thread(), (store, rank)

    def begin_inside(self, store: Any, lane: int) -> None:
        """Send heartbeats to the other processes of this member too, in and between epochs.

        Args:
            store: The store of the member, over the connection of the lifeline.
            lane: The number of this process in it.
        """
        self._inside = store, lane

    def rest(self) -> None:
        """Send none, as this worker has left its epoch."""
        self._place = None

    @property
    def is_led(self) -> bool:
        """True as long as some thread may train."""
        return threading.main_thread().is_alive() or self._trainer.is_alive()

    def send(self) -> None:
        """Send one, if this worker is in an epoch and trains."""
        for place in (self._place, self._inside):
            if place is not None and self.is_led:
                self._number += 1
                beat(*place, self._number)


class Line(dist.Store):  # type: ignore[name-defined,misc]
    """A store over a connection that may be made anew; torch takes it as any store.

    Attributes:
        made: The connection; None while the store is away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None

    def _ask(self, name: str, *args: Any) -> Any:
        made = self.made
        if made is None:
            raise DistNetworkError("the store is away")
        try:
            return getattr(made, name)(*args)
        except DistNetworkError:
            if self.made is made:
                self.made = None  # the lifeline cuts it, and connects again
            raise

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, *limit_s: float) -> bytes:
        found: bytes = self._ask("get", key, *limit_s)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        found: bytes = self._ask("compare_set", key, expected, value)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._ask("wait", keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    deleteKey = delete_key  # noqa: N815 the name by which torch's C++ calls it

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = self._ask("multi_get", keys)
        return found

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask("multi_set", keys, values)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, value)

    def has_extended_api(self) -> bool:
        return bool(self._ask("has_extended_api"))

    @property
    def underlying_store(self) -> Any:
        """The connection; None while the store is away."""
        return self.made


class Connections:
    """A worker's connections to a store, which are made and cut together.

    Args:
        connect: Function that makes one.
        limit_s: Seconds that the store may be silent, without time in which this process is
            stopped.

    Attributes:
        main, asked: The connection of all threads but one, and the one that the lifeline asks over,
            which nobody else waits on.
        trouble: The error for which they are not made again; None for none.
        back_s: When they were made again; -inf before.
    """

    def __init__(self, connect: Callable[[], Any], limit_s: float) -> None:
        self._connect, self._limit_s = connect, limit_s
        self._sockets: list[socket.socket] = []
        self.main, self.asked = Line(), Line()
        self.trouble: CrewError | None = None
        self.back_s = -math.inf

    @property
    def are_away(self) -> bool:
        """True while the store is away."""
        return self.main.made is None or self.asked.made is None

    def make(self, restore: Callable[[Any], None] = lambda store: None) -> None:
        """Connect, and use the connections once the store has what the run needs.

        Args:
            restore: Function that sees to this, over one of them.

        Raises:
            RuntimeError: No store answers any more.
            CrewError: No store answers, or ``restore`` raises it.
        """
        made = [self._open(), self._open()]
        restore(made[0])
        self.main.made, self.asked.made = made

    def _open(self) -> Any:
        """Make a connection that is cut with the others."""
        before = _list_sockets()
        made = self._connect()
        limit = struct.pack("ll", int(self._limit_s), int(self._limit_s % 1 * 1e6))
        for found in _find_connections(made.port, before):
            self._sockets.append(found)
            with suppress(OSError):
                # A wait with this limit begins anew when a stopped process continues.
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        return made

    @property
    def can_be_cut(self) -> bool:
        """True if this process has found its connections."""
        return bool(self._sockets)

    def cut(self) -> None:
        """Let pending requests fail: a late answer would be taken for that to another request."""
        self.main.made = self.asked.made = None
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Let go of the connections, which end with their last user."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


class Lifeline:
    """Keep a worker connected to a store.

    A thread asks the store over a connection of its own, with a time limit, and sends heartbeats.
    If no answer comes, it cuts all connections, and makes new ones as soon as a store answers.

    Args:
        connect: Function that makes a connection; it looks up the name of the host.
        limit_s: Seconds that the store may be silent, without time in which this process is
            stopped.
        restore: Function that makes a store that has come back fit for this worker, over a new
            connection; it raises CrewError for one that cannot be.
        make_gone_error: Function that makes the error for a store that must not be lost; None where
            it may be.
        name: The store, in words.

    Attributes:
        pulse: The worker's heartbeats.
        connections: The connections.

    Raises:
        CrewError: No store answers.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        limit_s: float,
        *,
        restore: Callable[[Any], None] = lambda store: None,
        make_gone_error: Callable[[Exception], CrewError] | None = None,
        name: str = "the store of the crew",
    ) -> None:
        self._ended, self.pulse = threading.Event(), Pulse()
        self.connections = Connections(connect, limit_s)
        self.connections.make()
        if not self.connections.can_be_cut:
            logger.warning(
                "%s does not list the connections of this process: a store that becomes silent "
                "blocks this worker",
                _OPEN_FILES,
            )
        keep_up = partial(
            _keep_up, self.connections, self._ended, self.pulse, restore, make_gone_error, name
        )
        run_in_background(keep_up, self._ended, "distlion lifeline")
        weakref.finalize(self, self._ended.set)

    def end(self) -> None:
        """Disconnect from the store."""
        self._ended.set()


def _list_sockets() -> set[tuple[int, int]]:
    """List numbers and inodes of this process's sockets; none if the system does not list them."""
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _find_connections(port: int, before: set[tuple[int, int]]) -> list[socket.socket]:
    """Find new connections to a port, as sockets to close; other threads may have made others."""
    connections = []
    for number, _ in _list_sockets() - before:
        with suppress(OSError):
            found = socket.socket(fileno=os.dup(number))
            try:
                is_new = found.family in _INTERNET and found.getpeername()[1] == port
            except OSError:
                is_new = False
            if is_new:
                connections.append(found)
            else:
                found.close()
    return connections


@contextmanager
def cut_after(limit_s: float, port: int) -> Iterator[None]:
    """Let an attempt to connect fail in time; torch waits for a first answer without end.

    Args:
        limit_s: Seconds for the attempt.
        port: The port at which the store should listen.
    """
    before, done = _list_sockets(), threading.Event()

    def cut() -> None:
        wait_s = limit_s
        while not done.wait(wait_s):
            wait_s = min(_TRY_S, limit_s)  # torch may try once more
            for found in _find_connections(port, before):
                with suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)
                found.close()

    threading.Thread(target=cut, name="distlion store connects", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _keep_up(
    connections: Connections,
    ended: threading.Event,
    pulse: Pulse,
    restore: Callable[[Any], None],
    make_gone_error: Callable[[Exception], CrewError] | None,
    name: str,
) -> None:
    """Send heartbeats over the connections until the end, and make them again when they are lost.

    Args:
        connections: The connections.
        ended: Event that is the end.
        pulse: The heartbeats.
        restore: As for ``Lifeline``.
        make_gone_error: Likewise.
        name: Likewise.
    """
    while (error := _ask_on(connections, ended, pulse)) is not None:
        connections.cut()
        if make_gone_error is not None:
            logger.warning("%s does not answer (%s)", name, error)
            connections.trouble = make_gone_error(error)
            break
        logger.warning(
            "%s does not answer (%s); training goes on. Until it is back nobody can join, and the "
            "loss of a member has to wait for it",
            name,
            error,
        )
        began_s = time.monotonic()
        if not _connect_again(connections, ended, restore):
            break
        # A warning too: whoever is alarmed by warnings has to hear the end.
        logger.warning("%s is back after %.1f s", name, time.monotonic() - began_s)
    connections.forget()


def _ask_on(connections: Connections, ended: threading.Event, pulse: Pulse) -> RuntimeError | None:
    """Ask a store, and send heartbeats; return the error with which it is lost, None at the end."""
    try:
        while not ended.wait(BEAT_S):
            pulse.send()
            connections.asked.check([""])  # a heartbeat has no answer
            if connections.are_away:
                raise DistNetworkError("a connection to it has closed")
    except RuntimeError as error:
        return error
    return None


def _connect_again(
    connections: Connections, ended: threading.Event, restore: Callable[[Any], None]
) -> bool:
    """Connect again; return False at the end, and where the store is of no use to this worker."""

    def check(store: Any) -> None:
        try:
            restore(store)
        except CrewError as error:
            connections.trouble = error
            raise

    while not ended.wait(_TRY_S):
        try:
            connections.make(check)
        except (CrewError, RuntimeError, OSError) as error:
            connections.cut()
            if connections.trouble is not None:
                logger.error("%s", error)
                return False
            continue
        connections.back_s = time.monotonic()
        return True
    return False

"""A worker's lifeline to the store: it sends heartbeats, and finds a store that is silent.

torch would wait for a silent store forever, so connections are cut.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from distlion.wire.background import run_in_background
from distlion.wire.heartbeats import BEAT_S, beat

logger = logging.getLogger("distlion")

_OPEN_FILES = "/dev/fd"


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


class Lifeline:
    """Cut all connections to a store once it has been silent for too long.

    A thread asks the store over a connection of its own, with a time limit, and sends heartbeats.
    After the cut, pending and later requests on all connections fail: a late answer would be taken
    for the answer to another request.

    Args:
        connect: Function that makes a connection.
        limit_s: Seconds that the store may be silent, without time in which this process is
            stopped.

    Attributes:
        pulse: The worker's heartbeats.
        asked: The connection that the thread asks over, which nobody else waits on.
    """

    def __init__(self, connect: Callable[[], Any], limit_s: float) -> None:
        self._connect, self._sockets = connect, list[socket.socket]()
        self._ended, self.pulse = threading.Event(), Pulse()
        self.asked = self.connect()
        if not self._sockets:
            logger.warning(
                "%s does not list the connections of this process: a store that becomes silent "
                "blocks this worker",
                _OPEN_FILES,
            )
        for each in self._sockets:
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            # A wait with this limit begins anew when a stopped process continues.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        listen = partial(ask_on, self.asked, self._sockets, self._ended, self.pulse)
        run_in_background(listen, self._ended, "distlion lifeline")
        weakref.finalize(self, self._ended.set)

    def connect(self) -> Any:
        """Make a connection that is cut with all others."""
        before = _list_sockets()
        made = self._connect()
        for number, _ in _list_sockets() - before:
            with suppress(OSError):
                found = socket.socket(fileno=os.dup(number))
                # Another thread may have opened one meanwhile.
                if found.getpeername()[1] == made.port:
                    self._sockets.append(found)
        return made

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


def ask_on(store: Any, sockets: list[socket.socket], ended: threading.Event, pulse: Pulse) -> None:
    """Ask a store, and send heartbeats, until the end; cut connections if it becomes silent.

    Args:
        store: The connection to ask over.
        sockets: The connections to cut.
        ended: Event that is the end.
        pulse: The heartbeats.
    """
    try:
        while not ended.wait(BEAT_S):
            pulse.send()
            store.check([""])  # a heartbeat has no answer
    except RuntimeError as error:
        logger.warning("the store of the crew does not answer (%s)", error)
        for each in list(sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
    for each in list(sockets):
        each.close()

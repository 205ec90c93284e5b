"""A guard against a silent store: torch would wait for it forever, so connections are cut."""

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

logger = logging.getLogger("distlion")

_LOOK_S = 0.5
_OPEN_FILES = "/dev/fd"


class Lifeline:
    """Cut all connections to a store once it has been silent for too long.

    A thread asks the store over a connection of its own, with a time limit. After the cut, pending
    and later requests on all connections fail: a late answer would be taken for the answer to
    another request.

    Args:
        connect: Function that makes a connection.
        limit_s: Seconds that the store may be silent, without time in which this process is
            stopped.
    """

    def __init__(self, connect: Callable[[], Any], limit_s: float) -> None:
        self._connect, self._sockets = connect, list[socket.socket]()
        self._ended = threading.Event()
        asked = self.connect()
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
        listen = partial(_ask, asked, self._sockets, self._ended)
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


def _ask(store: Any, sockets: list[socket.socket], ended: threading.Event) -> None:
    try:
        while not ended.wait(_LOOK_S):
            store.check([""])
    except RuntimeError as error:
        logger.warning("the store of the crew does not answer (%s)", error)
        for each in list(sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
    for each in list(sockets):
        each.close()

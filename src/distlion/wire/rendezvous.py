"""Meetings: the members of a group find each other through its store, and connect.

Each publishes its addresses and a key, which only those who read the store know. The member with
the greater rank dials, says which member it is, and both prove that they know both keys:

    who dials:    magic (4 B) | version (2 B) | ranks of both (2 x 4 B) | number of members (4 B) |
                  meeting (16 B) | nonce (16 B) | proof (32 B)
    who listens:  magic (4 B) | proof (32 B)

A proof is an HMAC-SHA256 of all that the dialing side has said before it. What follows is checked
against damage, and not encrypted. All of a meeting is done by the thread that calls for it, and its
port is open only meanwhile.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from distlion.wire.addresses import list_hosts, listen, read_ports

logger = logging.getLogger("distlion")

WIRE_VERSION = 1
_MAGIC = b"DLtp"
_SAID = struct.Struct("<4sHIII16s16s")
_PROOF_BYTES = 32
_ASKED_BYTES = _SAID.size + _PROOF_BYTES
_ANSWER_BYTES = len(_MAGIC) + _PROOF_BYTES
_MOST_GUESTS = 128
"""Connections that have not shown yet who they are; of more, the oldest is closed."""
_MOST_AT_ONCE = 32
"""Connections taken in a row, so that those taken before are read meanwhile."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Until a member that closed a connection is dialed again: as it does of the oldest of many."""
_SIGN_OF_LIFE_S, _MOST_SIGNS = 60, 120
_LONGEST_WAIT_S = 1e6
"""epoll counts milliseconds in 32 bits: 24 days at most, and a limit of a step may be longer."""
_Wait = tuple[socket.socket | None, int, float]
"""A task waits for an event on a socket until a moment; without a socket, only for the moment."""
_Task = Generator[_Wait, None, None]


class MeetingError(RuntimeError):
    """The members of a group did not all connect."""


class _Meeting:
    """The connections of a member of one group to all others, while they are made.

    Args:
        rank: This member.
        size: Number of members.
        names: Ranks that errors name, by rank in the group.
        deadline_s: Its end, by the monotonic clock.
    """

    def __init__(self, rank: int, size: int, names: Sequence[int], deadline_s: float) -> None:
        self.rank, self._size, self._names, self._deadline_s = rank, size, names, deadline_s
        self.number, self.key = secrets.token_bytes(16), secrets.token_bytes(32)
        self._keys: dict[int, bytes] = {}
        self.sockets: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[_Task, _Wait] = {}
        self._guests: dict[_Task, None] = {}

    def connect(self, servers: Sequence[socket.socket], published: dict[int, list[Any]]) -> None:
        """Dial the members before this one, and be dialed by those behind it.

        Raises:
            MeetingError: One of them cannot be reached, or does not come.
        """
        self._keys = {peer: bytes.fromhex(key) for peer, (_, _, key, _) in published.items()}
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ)
        for peer in range(self.rank):
            self._begin(self._dial(peer, *published[peer]))
        while missing := [each for each in published if each not in self.sockets]:
            now_s = time.monotonic()
            if now_s >= self._deadline_s:
                who = self._names[max(missing)]  # those before this one have errors of their own
                raise MeetingError(f"rank {who} did not connect to this one in time")
            ends_s = (until_s for _, _, until_s in self._tasks.values())
            limit_s = min(self._deadline_s, *ends_s, math.inf) - now_s
            self._move(min(max(0.0, limit_s), _LONGEST_WAIT_S))

    def _move(self, limit_s: float) -> None:
        """Let all go on that can; those first who are here already."""
        ready = [key for key, _ in self._selector.select(limit_s)]
        for key in ready:
            if key.data is not None:
                self._resume(key.data)
        for key in ready:
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        now_s = time.monotonic()
        for task, (_, _, until_s) in list(self._tasks.items()):
            if until_s <= now_s:
                self._resume(task, is_late=True)

    def _begin(self, task: _Task) -> None:
        self._tasks[task] = None, 0, 0.0
        self._resume(task)

    def _resume(self, task: _Task, *, is_late: bool = False) -> None:
        if task not in self._tasks:
            return  # it has been closed meanwhile
        connection, _, _ = self._tasks.pop(task)
        if connection is not None:
            self._selector.unregister(connection)
        try:
            late = TimeoutError("timed out")
            wait = task.throw(late) if is_late and connection is not None else next(task)
        except StopIteration:
            self._guests.pop(task, None)
            return
        self._tasks[task] = wait
        if wait[0] is not None:
            self._selector.register(wait[0], wait[1], task)

    def _end(self, task: _Task) -> None:
        connection, _, _ = self._tasks.pop(task)
        if connection is not None:
            self._selector.unregister(connection)
        self._guests.pop(task, None)
        task.close()

    def close(self) -> None:
        """Close all connections that are not in ``sockets``."""
        for task in list(self._tasks):
            self._end(task)
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # such as too many open files
                logger.debug("a connection is not accepted: %s", error)
                if self._guests:
                    self._end(next(iter(self._guests)))
                else:
                    time.sleep(_FIRST_PAUSE_S)
                return
            _open.add(connection)
            connection.setblocking(False)
            if len(self._guests) == _MOST_GUESTS:
                self._end(next(iter(self._guests)))
            guest = self._ask(connection)
            self._guests[guest] = None
            self._begin(guest)

    def _ask(self, connection: socket.socket) -> _Task:
        """Ask who has connected, and take the connection of a member that proves to be one."""
        asked, is_welcome = b"", False
        try:
            _prepare(connection)
            while len(asked) < _ASKED_BYTES:
                yield connection, selectors.EVENT_READ, math.inf
                more = connection.recv(_ASKED_BYTES - len(asked))
                asked += more
                if not more or not asked.startswith(_MAGIC[: len(asked)]):
                    return
            is_welcome = self._admit(connection, asked[: _SAID.size], asked[_SAID.size :])
        except OSError:
            pass
        finally:
            if not is_welcome:
                connection.close()

    def _admit(self, connection: socket.socket, said: bytes, proof: bytes) -> bool:
        _, version, peer, asked, size, number, _ = _SAID.unpack(said)
        fits = version == WIRE_VERSION and (asked, size) == (self.rank, self._size)
        if not fits or number != self.number or not self.rank < peer < self._size:
            return False
        if not hmac.compare_digest(proof, self._prove(peer, b"dials", said)):
            return False
        if peer in self.sockets:  # it may have dialed again, after it was late to hear the answer
            if not _has_ended(self.sockets[peer]):
                return False
            self.sockets.pop(peer).close()
        connection.sendall(_MAGIC + self._prove(peer, b"listens", said))
        self.sockets[peer] = connection
        return True

    def _prove(self, peer: int, side: bytes, said: bytes) -> bytes:
        """Return the proof that one knows the keys of both, for all that was said."""
        ranks = sorted((self.rank, peer))
        key = b"".join(self.key if each == self.rank else self._keys[each] for each in ranks)
        return hmac.digest(key, side + said, "sha256")

    def _dial(
        self, peer: int, _version: int, number: str, _key: str, addresses: Sequence[Sequence[Any]]
    ) -> _Task:
        """Connect to a member at the first of its addresses that answers.

        Raises:
            MeetingError: None does.
        """
        errors: list[str] = []
        said = _SAID.pack(
            _MAGIC,
            WIRE_VERSION,
            self.rank,
            peer,
            self._size,
            bytes.fromhex(number),
            secrets.token_bytes(16),
        )
        words = said + self._prove(peer, b"dials", said)
        answer = _MAGIC + self._prove(peer, b"listens", said)
        for place, (host, port) in enumerate(addresses):
            now_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
            until_s = now_s + (self._deadline_s - now_s) / (len(addresses) - place)
            while True:
                try:
                    found = yield from _greet(host, port, words, answer, until_s)
                    if found is not None:
                        self.sockets[peer] = found
                        return
                except OSError as error:
                    errors.append(f"{host}:{port}: {error}")
                    break
                if time.monotonic() + pause_s > until_s:
                    errors.append(f"{host}:{port}: closed the connection")
                    break
                yield None, 0, time.monotonic() + pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        who = f"rank {self._names[peer]}"
        raise MeetingError(f"{who} cannot be reached at {', '.join(errors)}")


def _greet(
    host: str, port: int, words: bytes, answer: bytes, until_s: float
) -> Generator[_Wait, None, socket.socket | None]:
    """Dial an address, say the words and wait for the answer.

    Returns:
        The connection; None if it was closed before an answer, as one of too many is.

    Raises:
        OSError: There is none, or its answer is another one.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, socket.SOCK_STREAM)
    _open.add(connection)
    heard = b""
    try:
        connection.setblocking(False)
        _prepare(connection)
        with suppress(BlockingIOError):
            connection.connect(where)
        yield connection, selectors.EVENT_WRITE, until_s
        if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        with suppress(ConnectionError):
            connection.sendall(words)
            while len(heard) < len(answer):
                yield connection, selectors.EVENT_READ, until_s
                more = connection.recv(len(answer) - len(heard))
                if not more:
                    break
                heard += more
        if heard and not hmac.compare_digest(heard, answer):
            raise OSError("does not know the keys of this group")
        return connection if heard else None
    finally:
        if heard != answer:
            connection.close()


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and signs of life in pauses, for firewalls forget idle links.

    A connection whose signs of life are not answered is kept for two hours: steps have limits of
    their own.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, _SIGN_OF_LIFE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_SIGNS)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of meetings. A fork of the process closes its copies of them."""


def _close_all() -> None:
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)


def meet(
    store: Any, rank: int, size: int, *, timeout_s: float, names: Sequence[int] | None = None
) -> list[socket.socket | None]:
    """Connect to all other members of a group: 1 publish, 2 read, 3 dial, and be dialed.

    Args:
        store: A store of the group alone, in which nobody has met before.
        rank: This member.
        size: Number of members.
        timeout_s: Seconds for all of it.
        names: Ranks that errors name, by rank in the group; None: those in the group.

    Returns:
        The sockets by rank, not blocking; None for this member.

    Raises:
        MeetingError: A member did not come, or speaks another version.
        InvalidArgumentError: An environment variable is no port, or names no interface.
    """
    names = range(size) if names is None else names
    meeting = _Meeting(rank, size, names, time.monotonic() + timeout_s)
    servers = _listen(store)
    try:
        # 1 publish
        addresses = [each.getsockname()[:2] for each in servers]
        own = [WIRE_VERSION, meeting.number.hex(), meeting.key.hex(), addresses]
        store.set(f"wire/{rank}", json.dumps(own))

        # 2 read
        others = [each for each in range(size) if each != rank]
        published = _read_all(store, others, timeout_s, names)
        for peer, (version, *_) in published.items():
            if version != WIRE_VERSION:
                raise MeetingError(f"rank {names[peer]} speaks version {version} of the wire")

        # 3 dial, and be dialed
        meeting.connect(servers, published)
    except BaseException:
        for connection in meeting.sockets.values():
            connection.close()
        raise
    finally:
        meeting.close()
        for server in servers:
            server.close()
    return [meeting.sockets.get(each) for each in range(size)]


def _listen(store: Any) -> list[socket.socket]:
    global _port
    try:
        servers = listen(list_hosts(_find_store(store)), ports=read_ports(), first=_port)
    except OSError as error:
        raise MeetingError(f"this worker has no port to listen at: {error}") from None
    _port = servers[0].getsockname()[1]
    _open.update(servers)
    for server in servers:
        server.setblocking(False)
    return servers


_port = 0
"""The port of the last group of this process; the next group tries it first."""


def _find_store(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (str(host), int(port)) if host and port else None


def _read_all(
    store: Any, ranks: Sequence[int], limit_s: float, names: Sequence[int]
) -> dict[int, list[Any]]:
    keys = [f"wire/{each}" for each in ranks]
    try:
        store.wait(keys, timedelta(seconds=max(0.01, limit_s)))
    except RuntimeError as error:
        missing = [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]
        who = f"rank {names[missing[0]]} did not come" if missing else str(error)
        raise MeetingError(who) from None
    words = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
    return {each: json.loads(word) for each, word in zip(ranks, words, strict=True)}

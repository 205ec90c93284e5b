"""Meetings: the members of a group find each other through its store, and connect.

Each publishes its addresses and a key, which only those who read the store know. The member with
the greater rank dials, says which member it is, and both prove that they know both keys:

    who dials:    magic (4 B) | version (2 B) | ranks of both (2 x 4 B) | number of members (4 B) |
                  meeting (16 B) | nonce (16 B) | proof (32 B)
    who listens:  magic (4 B) | proof (32 B)

A proof is an HMAC-SHA256 of all that the dialing side has said before it. What follows is checked
against damage, and not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from distlion.wire.addresses import list_hosts, listen, read_ports

WIRE_VERSION = 1
_MAGIC = b"DLtp"
_SAID = struct.Struct("<4sHIII16s16s")
_PROOF_BYTES = 32
_ANSWER_BYTES = len(_MAGIC) + _PROOF_BYTES
_PROVE_S = 5.0
"""Seconds for a connection to say who it is."""
_MOST_GUESTS = 128
"""Connections that are asked who they are at the same time; others wait their turn."""
_MOST_DIALS = 16


class MeetingError(RuntimeError):
    """The members of a group did not all connect."""


class _Meeting:
    """One group's connections that others make to this process.

    Args:
        rank: This member.
        size: Number of members.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.number, self.key = secrets.token_bytes(16), secrets.token_bytes(32)
        self.keys: dict[int, bytes] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.changed = threading.Condition()

    def prove(self, peer: int, side: bytes, said: bytes) -> bytes:
        """Return the proof that one knows the keys of both, for all that was said."""
        ranks = sorted((self.rank, peer))
        key = b"".join(self.key if each == self.rank else self.keys[each] for each in ranks)
        return hmac.digest(key, side + said, "sha256")

    def admit(self, connection: socket.socket, said: bytes) -> bool:
        """Take the connection of a member that proves to be one; return whether it does."""
        _, version, peer, asked, size, _, _ = _SAID.unpack(said)
        proof = _read(connection, _PROOF_BYTES)
        fits = version == WIRE_VERSION and (asked, size) == (self.rank, self.size)
        if not fits or not self.rank < peer < self.size:
            return False
        with self.changed:  # a member may dial before this one has read the others' keys
            self.changed.wait_for(lambda: peer in self.keys, _PROVE_S)
            if peer not in self.keys or peer in self.sockets:
                return False
            if not hmac.compare_digest(proof, self.prove(peer, b"dials", said)):
                return False
            connection.sendall(_MAGIC + self.prove(peer, b"listens", said))
            self.sockets[peer] = connection
            self.changed.notify_all()
        return True


class _Listener:
    """The port of this process, where connections of all its groups arrive.

    Args:
        hosts: The addresses at which others are told to reach it.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        try:
            self.servers = listen(hosts, ports=read_ports())
        except OSError as error:
            raise MeetingError(f"this worker has no port to listen at: {error}") from None
        self.addresses = [server.getsockname()[:2] for server in self.servers]
        self.meetings: weakref.WeakValueDictionary[bytes, _Meeting] = weakref.WeakValueDictionary()
        self._guests = threading.Semaphore(_MOST_GUESTS)
        for server in self.servers:
            threading.Thread(
                target=self._accept, args=(server,), name="distlion listener", daemon=True
            ).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            self._guests.acquire()
            try:
                connection, _ = server.accept()
            except OSError:  # such as too many open files
                self._guests.release()
                time.sleep(0.1)
                continue
            threading.Thread(
                target=self._ask, args=(connection,), name="distlion guest", daemon=True
            ).start()

    def _ask(self, connection: socket.socket) -> None:
        is_welcome = False
        try:
            connection.settimeout(_PROVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = _read(connection, _SAID.size)
            meeting = self.meetings.get(_SAID.unpack(said)[5]) if said[:4] == _MAGIC else None
            is_welcome = meeting is not None and meeting.admit(connection, said)
        except OSError:
            pass
        finally:
            if not is_welcome:
                connection.close()
            self._guests.release()


def _listen(hosts: tuple[str, ...]) -> _Listener:
    if hosts not in _listeners:
        _listeners[hosts] = _Listener(hosts)
    return _listeners[hosts]


_listeners: dict[tuple[str, ...], _Listener] = {}
"""By addresses: groups whose stores are reached by other ways have other ones."""


def _forget_listener() -> None:
    """Close a fork's copy of the port, whose threads are in the other process."""
    for listener in _listeners.values():
        for server in listener.servers:
            server.close()
    _listeners.clear()


os.register_at_fork(after_in_child=_forget_listener)


def meet(
    store: Any, rank: int, size: int, *, timeout_s: float, names: Sequence[int] | None = None
) -> list[socket.socket | None]:
    """Connect to all other members of a group: 1 publish, 2 read, 3 dial, 4 be dialed.

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
    deadline_s = time.monotonic() + timeout_s
    listener, meeting = _listen(list_hosts(_find_store(store))), _Meeting(rank, size)
    names = range(size) if names is None else names
    listener.meetings[meeting.number] = meeting
    try:
        # 1 publish
        own = [WIRE_VERSION, meeting.number.hex(), meeting.key.hex(), listener.addresses]
        store.set(f"wire/{rank}", json.dumps(own))

        # 2 read
        others = [each for each in range(size) if each != rank]
        published = _read_all(store, others, deadline_s, names)
        with meeting.changed:
            for peer, (version, _, key, _) in published.items():
                if version != WIRE_VERSION:
                    raise MeetingError(f"rank {names[peer]} speaks version {version} of the wire")
                meeting.keys[peer] = bytes.fromhex(key)
            meeting.changed.notify_all()

        # 3 dial
        lower = [each for each in others if each < rank]
        with ThreadPoolExecutor(max(1, min(len(lower), _MOST_DIALS))) as pool:
            dialed = {
                peer: pool.submit(_dial, meeting, peer, published[peer], deadline_s, names[peer])
                for peer in lower
            }
        for peer, found in dialed.items():
            if found.exception() is None:
                meeting.sockets[peer] = found.result()
        for found in dialed.values():
            found.result()  # raises, once all that have to be closed are known

        # 4 be dialed
        with meeting.changed:
            meeting.changed.wait_for(
                lambda: len(meeting.sockets) == len(others), deadline_s - time.monotonic()
            )
            missing = [each for each in others if each not in meeting.sockets]
            if missing:
                raise MeetingError(f"rank {names[missing[0]]} did not connect to this one in time")
            del listener.meetings[meeting.number]
    except BaseException:
        _close(meeting)
        raise
    for connection in meeting.sockets.values():
        connection.setblocking(False)
    return [meeting.sockets.get(each) for each in range(size)]


def _close(meeting: _Meeting) -> None:
    with meeting.changed:
        meeting.keys.clear()  # nobody is admitted any more
        for connection in meeting.sockets.values():
            connection.close()


def _find_store(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (str(host), int(port)) if host and port else None


def _read_all(
    store: Any, ranks: Sequence[int], deadline_s: float, names: Sequence[int]
) -> dict[int, list[Any]]:
    keys = [f"wire/{each}" for each in ranks]
    try:
        store.wait(keys, timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
    except RuntimeError as error:
        missing = [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]
        who = f"rank {names[missing[0]]} did not come" if missing else str(error)
        raise MeetingError(who) from None
    words = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
    return {each: json.loads(word) for each, word in zip(ranks, words, strict=True)}


def _dial(
    meeting: _Meeting, peer: int, published: Sequence[Any], deadline_s: float, name: int
) -> socket.socket:
    """Connect to a member at the first of its addresses that answers.

    Raises:
        MeetingError: None does.
    """
    _, number, _, addresses = published
    errors: list[str] = []
    said = _SAID.pack(
        _MAGIC,
        WIRE_VERSION,
        meeting.rank,
        peer,
        meeting.size,
        bytes.fromhex(number),
        secrets.token_bytes(16),
    )
    for place, (host, port) in enumerate(addresses):
        now_s = time.monotonic()
        until_s = now_s + (deadline_s - now_s) / (len(addresses) - place)
        connection = None
        try:
            connection = socket.create_connection((host, port), max(0.01, until_s - now_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(max(0.01, until_s - time.monotonic()))
            connection.sendall(said + meeting.prove(peer, b"dials", said))
            answer = _read(connection, _ANSWER_BYTES)
            wanted = _MAGIC + meeting.prove(peer, b"listens", said)
            if hmac.compare_digest(answer, wanted):
                return connection
            errors.append(f"{host}:{port} does not know the keys of this group")
        except OSError as error:
            errors.append(f"{host}:{port}: {error}")
        if connection is not None:
            connection.close()
    raise MeetingError(f"rank {name} cannot be reached at {', '.join(errors)}")


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    """Read bytes of a connection, which has a few seconds for all of them.

    Raises:
        OSError: It ended, or was silent.
    """
    data, until_s = b"", time.monotonic() + _PROVE_S
    while len(data) < n_bytes:
        if time.monotonic() > until_s:
            raise OSError("said too little")
        more = connection.recv(n_bytes - len(data))
        if not more:
            raise OSError("closed the connection")
        data += more
    return data

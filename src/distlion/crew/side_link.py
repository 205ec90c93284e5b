"""A connection of two workers beside their groups, for a stream from one to the other.

Both show that they know the run's secret before anything else is sent. What follows is checked
against damage, and not encrypted, as votes.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import selectors
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from distlion.wire.addresses import list_hosts, listen

Sign = Callable[[str, str], str]
"""Function that signs a text under a name with the run's secret."""

SILENT_S = 10.0
"""Seconds without progress after which the other side counts as gone."""
_PART_BYTES = 1 << 20
"""Bytes that have to be sent within these seconds, on any link."""
_DIAL_S, _PROVE_S = 2.0, 5.0
"""Seconds to connect, and until both have shown that they know the secret."""
_PREFIX = struct.Struct("<4sIQI")
_MAGIC = b"dlsl"
_MOST_HEADER_BYTES, _MOST_PROOF_BYTES = 64 << 20, 1 << 12
_NO_MESSAGE = "what came is no message of this connection"
_NOTHING = torch.zeros(0, dtype=torch.uint8, device="cpu")


class SideLink:
    """One end of a connection.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: dict[str, Any], payload: Tensor = _NOTHING) -> None:
        """Send a message.

        Args:
            header: Numbers, strings and lists.
            payload: Bytes, uint8 on the CPU.

        Raises:
            OSError: The other side is gone, or silent.
        """
        text, data = json.dumps(header).encode(), payload.contiguous().numpy().data
        check = zlib.crc32(data, zlib.crc32(text))
        for part in (_PREFIX.pack(_MAGIC, len(text), len(data), check) + text, data):
            for start in range(0, len(part), _PART_BYTES):
                self._connection.sendall(part[start : start + _PART_BYTES])

    def receive(
        self,
        most_bytes: int,
        *,
        most_header_bytes: int = _MOST_HEADER_BYTES,
        until_s: float = math.inf,
    ) -> tuple[dict[str, Any], Tensor]:
        """Receive a message.

        Args:
            most_bytes: Most bytes of its payload.
            most_header_bytes: Most bytes of its header.
            until_s: End of the wait for it, by the monotonic clock.

        Raises:
            OSError: The other side is gone or silent, or bytes were damaged on the way.
        """
        magic, n_text, n_data, check = _PREFIX.unpack(self._read(_PREFIX.size, until_s))
        if magic != _MAGIC or n_text > most_header_bytes or n_data > most_bytes:
            raise OSError(_NO_MESSAGE)
        text, data = self._read(n_text, until_s), self._read(n_data, until_s)
        if zlib.crc32(data, zlib.crc32(text)) != check:
            raise OSError("bytes were damaged on the way")
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OSError(_NO_MESSAGE) from error
        if not isinstance(header, dict):
            raise OSError(_NO_MESSAGE)
        return header, torch.frombuffer(data, dtype=torch.uint8) if n_data else _NOTHING

    def close(self) -> None:
        """Close it; who waits for it in another thread is woken."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, n_bytes: int, until_s: float) -> bytearray:
        data = bytearray(n_bytes)
        view, got = memoryview(data), 0
        while got < n_bytes:
            if time.monotonic() > until_s:
                raise OSError("the message did not come in time")
            n = self._connection.recv_into(view[got:])
            if not n:
                raise OSError("the other side has closed the connection")
            got += n
        return data

    def prove(self, name: str, sign: Sign, nonce: str, *, is_first: bool) -> bool:
        """Show that this side knows the secret; return whether the other does.

        Args:
            name: Name under which both sign.
            sign: Function that signs.
            nonce: The words of the side that listens.
            is_first: Whether this is the side that has dialed, which shows it first.

        Raises:
            OSError: The other side is gone, silent, or takes too long.
        """
        until_s = time.monotonic() + _PROVE_S
        if is_first:
            own = secrets.token_hex(16)
            self.send({"nonce": own, "proof": sign(f"{name}/dials", nonce)})
            answer, _ = self.receive(0, most_header_bytes=_MOST_PROOF_BYTES, until_s=until_s)
            return _is_same(answer.get("proof"), sign(f"{name}/listens", own))
        asked, _ = self.receive(0, most_header_bytes=_MOST_PROOF_BYTES, until_s=until_s)
        if not _is_same(asked.get("proof"), sign(f"{name}/dials", nonce)):
            return False
        self.send({"proof": sign(f"{name}/listens", str(asked.get("nonce")))})
        return True


class Listener:
    """A port at which one worker is expected.

    It is one of the addresses of ``list_hosts``, and of no other interface.

    Args:
        toward: Address of the store, which shows by which interface others reach this host.

    Attributes:
        addresses: Where others reach it: pairs of a host and a port.
        nonce: Words that the other side signs.

    Raises:
        OSError: There is no free port, or no address.
        InvalidArgumentError: The interface has no address.
    """

    def __init__(self, toward: tuple[str, int]) -> None:
        self._servers = listen(list_hosts(toward))
        self.addresses = [list(each.getsockname()[:2]) for each in self._servers]
        self.nonce = secrets.token_hex(16)

    def accept(self, name: str, sign: Sign, *, limit_s: float) -> SideLink:
        """Wait for the worker that knows the secret, and stop listening.

        Raises:
            OSError: It does not come.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            while True:
                link = SideLink(self._take(deadline_s))
                with suppress(OSError, ValueError):
                    if link.prove(name, sign, self.nonce, is_first=False):
                        return link
                link.close()
        finally:
            self.close()

    def _take(self, deadline_s: float) -> socket.socket:
        with selectors.DefaultSelector() as selector:
            for server in self._servers:
                selector.register(server, selectors.EVENT_READ)
            for key, _ in selector.select(max(0.01, deadline_s - time.monotonic())):
                server = cast(socket.socket, key.fileobj)
                server.settimeout(0.01)  # who dialed may have hung up
                connection, _ = server.accept()
                return connection
        raise OSError("timed out")

    def close(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()


def dial(addresses: Sequence[Sequence[Any]], name: str, sign: Sign, nonce: str) -> SideLink:
    """Connect to a listener.

    Args:
        addresses: Where it may be.
        name: Name under which both sign.
        sign: Function that signs.
        nonce: Its words.

    Raises:
        OSError: It is at none of them.
    """
    errors = []
    for host, port in addresses:
        try:
            link = SideLink(socket.create_connection((host, port), timeout=_DIAL_S))
        except OSError as error:
            errors.append(f"{host}:{port}: {error}")
            continue
        try:
            if link.prove(name, sign, nonce, is_first=True):
                return link
            errors.append(f"{host}:{port}: it does not know the secret of this run")
        except (OSError, ValueError) as error:
            errors.append(f"{host}:{port}: {error}")
        link.close()
    raise OSError("; ".join(errors))


def _is_same(found: object, expected: str) -> bool:
    return hmac.compare_digest(str(found).encode(), expected.encode())

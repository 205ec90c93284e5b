"""A connection of two workers beside their groups, for a stream from one to the other.

Both show that they know the run's secret before anything else is sent. What follows is checked
against damage, and not encrypted, as votes.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

Sign = Callable[[str, str], str]
"""Function that signs a text under a name with the run's secret."""

SILENT_S = 10.0
"""Seconds without a byte after which the other side counts as gone."""
_DIAL_S = 2.0
_PREFIX = struct.Struct("<4sIQI")
_MAGIC = b"dlsl"
_MOST_HEADER_BYTES = 64 << 20
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
        self._connection.sendall(_PREFIX.pack(_MAGIC, len(text), len(data), check) + text)
        self._connection.sendall(data)

    def receive(self, most_bytes: int) -> tuple[dict[str, Any], Tensor]:
        """Receive a message.

        Args:
            most_bytes: Most bytes of its payload.

        Raises:
            OSError: The other side is gone or silent, or bytes were damaged on the way.
        """
        magic, n_text, n_data, check = _PREFIX.unpack(self._read(_PREFIX.size))
        if magic != _MAGIC or n_text > _MOST_HEADER_BYTES or n_data > most_bytes:
            raise OSError("what came is no message of this connection")
        text, data = self._read(n_text), self._read(n_data)
        if zlib.crc32(data, zlib.crc32(text)) != check:
            raise OSError("bytes were damaged on the way")
        header: dict[str, Any] = json.loads(text)
        return header, torch.frombuffer(data, dtype=torch.uint8) if n_data else _NOTHING

    def close(self) -> None:
        """Close it; who waits for it in another thread is woken."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, n_bytes: int) -> bytearray:
        data = bytearray(n_bytes)
        view, got = memoryview(data), 0
        while got < n_bytes:
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
        """
        if is_first:
            own = secrets.token_hex(16)
            self.send({"nonce": own, "proof": sign(f"{name}/dials", nonce)})
            answer, _ = self.receive(0)
            return _is_same(answer.get("proof"), sign(f"{name}/listens", own))
        asked, _ = self.receive(0)
        if not _is_same(asked.get("proof"), sign(f"{name}/dials", nonce)):
            return False
        self.send({"proof": sign(f"{name}/listens", str(asked.get("nonce")))})
        return True


class Listener:
    """A port at which one worker is expected.

    Args:
        toward: Address of the store, which shows by which interface others reach this host.

    Attributes:
        addresses: Where others reach it: pairs of a host and a port.
        nonce: Words that the other side signs.

    Raises:
        OSError: There is no free port.
    """

    def __init__(self, toward: tuple[str, int]) -> None:
        two = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if two else socket.AF_INET, dualstack_ipv6=two
        )
        port = self._server.getsockname()[1]
        self.addresses = [[host, port] for host in list_hosts(toward)]
        self.nonce = secrets.token_hex(16)

    def accept(self, name: str, sign: Sign, *, limit_s: float) -> SideLink:
        """Wait for the worker that knows the secret, and stop listening.

        Raises:
            OSError: It does not come.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            while True:
                self._server.settimeout(max(0.01, deadline_s - time.monotonic()))
                link = SideLink(self._server.accept()[0])
                with suppress(OSError, ValueError):
                    if link.prove(name, sign, self.nonce, is_first=False):
                        return link
                link.close()
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


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


@cache
def list_hosts(toward: tuple[str, int]) -> tuple[str, ...]:
    """List this host's addresses: of ``GLOO_SOCKET_IFNAME``, toward the store, of its name."""
    hosts: list[str] = []
    route = ""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with suppress(OSError, ImportError):
            hosts.append(_find_address(interface))
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # no packet is sent
            route = str(probe.getsockname()[0])
            hosts.append(route)
    # The store is on this host, or unreachable. Elsewhere a name server is not to be waited for.
    if not route or route.startswith("127.") or route == "::1":
        with suppress(OSError):
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            hosts += [str(each[4][0]) for each in found]
    return tuple(dict.fromkeys(hosts))


def _find_address(interface: str) -> str:
    """Return the IPv4 address of an interface."""
    import fcntl

    asked = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


def _is_same(found: object, expected: str) -> bool:
    return hmac.compare_digest(str(found).encode(), expected.encode())

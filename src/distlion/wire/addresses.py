"""Addresses at which other workers reach this host; this process listens at no other."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from distlion.errors import InvalidArgumentError

logger = logging.getLogger("distlion")

PORT_VARIABLE = "DISTLION_WIRE_PORT"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 1024
_MOST_TRIES = 8
"""Free ports of the first address that are tried at the others."""
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}
"""This host has no such address; of IPv6 also one that needs an interface."""
_ASK_FOR_ADDRESS = 0x8915  # SIOCGIFADDR
_ADDRESSES_OF_IPV6 = "/proc/net/if_inet6"


def list_hosts(toward: tuple[str, int] | None) -> tuple[str, ...]:
    """List this host's addresses, the best one first.

    Args:
        toward: Address of the store; None for a store that has none.

    Returns:
        Those of the interface that ``GLOO_SOCKET_IFNAME`` names. Without it, the one toward the
        store, and those of this host's name where the store is on this host.

    Raises:
        InvalidArgumentError: The named interface has no address.
    """
    if chosen := list_chosen():
        return chosen
    route = "" if toward is None else _find_route(toward)
    hosts = [route] if route else []
    # The store is on this host, or unknown. Elsewhere a name server is not to be waited for.
    if not route or route.startswith("127.") or route == "::1":
        hosts += [*_list_by_name(), *([] if route else ["127.0.0.1"])]
    return tuple(dict.fromkeys(hosts))


def list_chosen() -> tuple[str, ...]:
    """List the addresses of the interface that the caller names; () where none is named."""
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    found = _list_addresses(interface) if interface else ()
    if interface and not found:
        raise InvalidArgumentError(
            f"{INTERFACE_VARIABLE}={interface}: expected an interface with an address; "
            "`ip address` lists them"
        )
    return found


@cache
def _list_by_name() -> tuple[str, ...]:
    """List the addresses of this host's name; a name server may take seconds to say them."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return tuple(str(each[4][0]) for each in found)
    return ()


def _find_route(toward: tuple[str, int]) -> str:
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # no packet is sent
            return str(probe.getsockname()[0])
    return ""


def _list_addresses(interface: str) -> tuple[str, ...]:
    """List the addresses of an interface: IPv4 first, then those of IPv6 beyond the link."""
    found = []
    with suppress(OSError, ImportError):
        import fcntl

        asked = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _ASK_FOR_ADDRESS, asked)
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open(_ADDRESSES_OF_IPV6) as lines:
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope in ("00", "10"):  # global, or of this host
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return tuple(found)


def listen(
    hosts: Sequence[str], *, ports: tuple[int, int] = (0, 0), first: int = 0
) -> list[socket.socket]:
    """Listen at addresses of this host, at one port of all of them; others are left out.

    Args:
        hosts: The addresses, as of ``list_hosts``: a name server may list what this host has not.
        ports: The least and the greatest port that may be used; (0, 0) for any free one.
        first: The port to try first, if it may be used; 0 for none.

    Raises:
        OSError: No port is free, or none of the addresses is one of this host.
    """
    least, greatest = ports
    tries = [*range(least, greatest + 1)] if greatest else [0] * _MOST_TRIES
    if first and (not greatest or first in tries):
        tries.insert(0, first)
    for turn, port in enumerate(tries, 1):
        try:
            return _listen_at(hosts, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or turn == len(tries):
                raise
    raise AssertionError


def _listen_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    servers: list[socket.socket] = []
    absent: OSError | None = None
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            servers.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno in _ABSENT:
                absent = error
                continue
            for server in servers:
                server.close()
            raise
        port = servers[0].getsockname()[1]
        _log_once(host, port)
    if not servers:
        raise absent or OSError("this host has no address that others know")
    return servers


@cache
def _log_once(host: str, port: int) -> None:
    logger.info("listens at %s, port %d", host, port)


def read_ports() -> tuple[int, int]:
    """Read the first and the last port of ``DISTLION_WIRE_PORT``; (0, 0) for any free one."""
    text = os.environ.get(PORT_VARIABLE, "") or "0"
    first, _, last = text.partition("-")
    if first.isdecimal() and (last or first).isdecimal():
        ports = int(first), int(last or first)
        if 0 <= ports[0] <= ports[1] < 1 << 16:
            return ports
    raise InvalidArgumentError(
        f"{PORT_VARIABLE}={text}: expected a port, such as 29600, or a range with a port for each "
        "process of this host, such as 29600-29607"
    )

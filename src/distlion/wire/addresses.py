"""Addresses at which other workers reach this host, and the port where this process listens."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from functools import cache
from typing import Any

from distlion.errors import InvalidArgumentError

PORT_VARIABLE = "DISTLION_WIRE_PORT"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 1024
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


def listen() -> list[socket.socket]:
    """Listen at one port: of the interface that ``GLOO_SOCKET_IFNAME`` names, or of all.

    Raises:
        InvalidArgumentError: ``DISTLION_WIRE_PORT`` is no port and no range of ports, or the
            interface has no address.
        OSError: None of them is free.
    """
    (first, last), hosts = read_ports(), list_chosen()
    for port in range(first, last + 1):
        try:
            return listen_at(hosts, port)
        except OSError:
            if port == last:
                raise
    raise AssertionError


def listen_at(hosts: tuple[str, ...], port: int) -> list[socket.socket]:
    """Listen at one port of these addresses; of all, by one socket, if there are none.

    Raises:
        OSError: The port is taken.
    """
    if not hosts:
        two = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if two else socket.AF_INET
        options: dict[str, Any] = {"backlog": _BACKLOG, "dualstack_ipv6": two}
        return [socket.create_server(("", port), family=family, **options)]
    servers: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            servers.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
            port = servers[0].getsockname()[1]
    except OSError:
        for server in servers:
            server.close()
        raise
    return servers


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

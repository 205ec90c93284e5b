"""Packets that come to a host: when the kernel had the last byte of what peers have sent.

No transport says that. It wakes a thread, which goes on when it gets a core; the two moments may
be far apart.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Constants of Linux that the module socket does not name.
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS, _ETH_P_IP = 33, 35, 0x0800
_TIMESPEC = struct.Struct("ll")
_QUEUE_BYTES = 64 << 20
_ETHERNET_BYTES = 14
_HEADS_BYTES = 256
"""More than the heads of Ethernet, IPv4 and TCP; the rest of a packet is not read."""


class Packet(NamedTuple):
    """A TCP packet with data.

    Attributes:
        at_ns: When it came, by the clock of ``time.perf_counter_ns``.
        source: Address of its sender.
        ports: Its ports there and here.
        sequence: Number of its first byte.
        n_bytes: Bytes of data.
    """

    at_ns: int
    source: str
    ports: tuple[int, int]
    sequence: int
    n_bytes: int


class Tap:
    """The packets that come to an interface; needs Linux and root rights.

    Args:
        interface: Name of the interface, in the namespace of this process.
    """

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_IP))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.bind((interface, _ETH_P_IP))
        self._socket.setblocking(False)

    def drain(self) -> list[Packet]:
        """Take the packets that have come since the last call."""
        came, space = [], socket.CMSG_SPACE(_TIMESPEC.size)
        # The kernel's moments are of the clock that users set.
        shift_ns = time.time_ns() - time.perf_counter_ns()
        while True:
            try:
                heads, notes, *_ = self._socket.recvmsg(_HEADS_BYTES, space)
            except BlockingIOError:
                return came
            (at,) = (note for _, kind, note in notes if kind == _SO_TIMESTAMPNS)
            seconds, rest_ns = _TIMESPEC.unpack(at)
            packet = read_packet(heads, seconds * 10**9 + rest_ns - shift_ns)
            if packet is not None:
                came.append(packet)


def read_packet(heads: bytes, at_ns: int) -> Packet | None:
    """Read the heads of a packet of Ethernet with IPv4; None if it carries no data of TCP."""
    ip = heads[_ETHERNET_BYTES:]
    ip_bytes, total, protocol = 4 * (ip[0] & 15), int.from_bytes(ip[2:4], "big"), ip[9]
    if protocol != socket.IPPROTO_TCP:
        return None
    tcp = ip[ip_bytes:]
    from_port, to_port, sequence = struct.unpack_from("!HHI", tcp)
    n_bytes = total - ip_bytes - 4 * (tcp[12] >> 4)
    source = socket.inet_ntoa(ip[12:16])
    return Packet(at_ns, source, (from_port, to_port), sequence, n_bytes) if n_bytes > 0 else None


def find_arrivals(packets: Iterable[Packet], marks: Sequence[int]) -> list[int]:
    """Return when every peer's first bytes were there: for each mark, that many of each.

    A peer's bytes are those of its busiest connection.

    Args:
        packets: The packets of a step, in their order.
        marks: Numbers of bytes.

    Raises:
        ValueError: There are fewer bytes of some peer.
    """
    flows: dict[tuple[str, tuple[int, int]], list[Packet]] = defaultdict(list)
    for packet in packets:
        flows[packet.source, packet.ports].append(packet)
    busiest: dict[str, list[Packet]] = {}
    for (source, _), flow in flows.items():
        busiest[source] = max(busiest.get(source, []), flow, key=_count_bytes)
    return [max(find_arrival(flow, mark) for flow in busiest.values()) for mark in marks]


def _count_bytes(flow: Sequence[Packet]) -> int:
    return sum(packet.n_bytes for packet in flow)


def find_arrival(flow: Sequence[Packet], n_bytes: int) -> int:
    """Return when a connection had brought so many bytes without a gap; arguments as above."""
    # Numbers begin anew behind 2**32. The first packet may be lost on its way, and come again.
    far = 2**31
    places = [(packet.sequence - flow[0].sequence + far) % 2**32 - far for packet in flow]
    first = min(places)
    ready, ahead = 0, []
    for packet, place in zip(flow, places, strict=True):
        begin = place - first
        ahead.append((begin, begin + packet.n_bytes))
        ahead.sort()
        while ahead and ahead[0][0] <= ready:
            ready = max(ready, ahead.pop(0)[1])
        if ready >= n_bytes:
            return packet.at_ns
    raise ValueError(f"{ready} bytes of a peer came; expected {n_bytes}")

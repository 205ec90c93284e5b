"""Forward frames between a lab's ports in place of its bridge, each one after the latency.

    python forward.py OWNER SECONDS PORT...

Run as a file, not as a module of the package: importing the package takes seconds. Once it
forwards, it writes one line and goes on in the background, until the process OWNER ends; 0 is for
none.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

_ETH_P_ALL = 0x0003
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
# A header of checksum offload that the kernel puts before each frame, and takes back.
_HEADER_BYTES, _ADDRESS_BYTES = 10, 6
_MOST_BYTES = 1 << 16
# As much as a port's queue may hold, and far more than arrives while this process waits its turn.
_BUFFER_BYTES = 32 << 20
# Frames of one port before the next one has its turn.
_TURN = 64


def open_port(name: str) -> socket.socket:
    """Open a port for all frames that arrive there, and for frames to send."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    port.setblocking(False)
    port.bind((name, _ETH_P_ALL))
    return port


class Switch:
    """Learn which port an address is behind, and send each frame there after the latency.

    Args:
        ports: Open ports.
        latency_s: Seconds from the arrival of a frame to its departure.
    """

    def __init__(self, ports: Sequence[socket.socket], latency_s: float) -> None:
        self._latency_s = latency_s
        self._ports = {port.fileno(): port for port in ports}
        self._behind: dict[bytes, socket.socket] = {}
        # Of (time of departure, port, frame); all wait equally long, so the first one leaves first.
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()

    def run(self, owner: int | None) -> None:
        """Forward frames until a process, of this descriptor, ends; None for ever."""
        events = select.epoll()
        for number in [*self._ports, *([] if owner is None else [owner])]:
            events.register(number, select.EPOLLIN)
        while True:
            for number, _ in events.poll(self.find_wait_s()):
                if number == owner:
                    return
                self.receive(number)
            self.send_due()

    def find_wait_s(self) -> float:
        """Return the seconds until a frame is due; -1 if none is waiting."""
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1.0

    def receive(self, number: int) -> None:
        """Take the frames that have arrived at a port, by its descriptor."""
        port = self._ports[number]
        for _ in range(_TURN):
            try:
                frame = port.recv(_MOST_BYTES)
            except OSError:  # no more for now, or the cable was pulled
                return
            due = time.monotonic() + self._latency_s
            target = frame[_HEADER_BYTES : _HEADER_BYTES + _ADDRESS_BYTES]
            source = frame[_HEADER_BYTES + _ADDRESS_BYTES : _HEADER_BYTES + 2 * _ADDRESS_BYTES]
            self._behind[source] = port
            known = self._behind.get(target)
            others = self._ports.values() if known is None else (known,)
            self._waiting += ((due, other, frame) for other in others if other is not port)

    def send_due(self) -> None:
        """Send the frames whose time has come."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, port, frame = self._waiting.popleft()
            try:
                port.send(frame)
            except OSError:  # its queue is full, or the cable was pulled: a switch drops the frame
                continue


def main(owner: int, latency_s: float, names: Sequence[str]) -> None:
    """Forward in the background.

    Raises:
        OSError: A port cannot be opened, or the owner is gone.
    """
    watched = os.pidfd_open(owner) if owner else None
    switch = Switch([open_port(name) for name in names], latency_s)
    if os.fork():
        os._exit(0)
    sys.stdout.write("forwards\n")
    sys.stdout.flush()
    # The owner waits for the end of what this process writes.
    for stream in (1, 2):
        os.dup2(0, stream)
    switch.run(watched)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])

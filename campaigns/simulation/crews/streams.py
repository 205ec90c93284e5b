"""Connections of two machines of a crew, beside their groups: what stands in for side links."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlion.crew.side_link import SILENT_S
from simulation.crews.network import CrewMachine, CrewNetwork
from simulation.kernel import running
from simulation.stand_ins import _Waitable

Sign = Callable[[str, str], str]
_DIAL_S = 2.0


def _find_machine() -> CrewMachine:
    machine = running().current.process
    assert isinstance(machine, CrewMachine)
    return machine


class Stream(_Waitable):
    """One end of a connection: a ``SideLink``.

    Args:
        network: Where it is.
        machine: The machine at this end.
    """

    def __init__(self, network: CrewNetwork, machine: CrewMachine) -> None:
        super().__init__()
        self._network, self._machine = network, machine
        self.peer: Stream
        self._come: deque[tuple[str, Tensor]] = deque()
        self._is_closed = self._is_over = False
        self._last_s = 0.0
        network.streams.append(self)

    def send(self, header: dict[str, Any], payload: Tensor | None = None) -> None:
        self._begin()
        data = torch.zeros(0, dtype=torch.uint8) if payload is None else payload.clone()
        text, peer = json.dumps(header), self.peer
        self._later(lambda: peer._take(text, data))
        self._kernel.sleep(0)

    def receive(self, most_bytes: int) -> tuple[dict[str, Any], Tensor]:
        self._begin()
        if not self._wait_for(lambda: bool(self._come) or self._is_over, SILENT_S):
            raise OSError("timed out")
        self._begin()
        if not self._come:
            raise OSError("the other side has closed the connection")
        text, data = self._come.popleft()
        assert data.numel() <= most_bytes
        return json.loads(text), data

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = self._is_over = True
            self._notify()
            self._later(self.peer._end)

    def lose(self, machine: CrewMachine) -> None:
        """Close it, as a machine is gone."""
        if machine is self._machine:
            self.close()

    def _begin(self) -> None:
        self._network.on_message(self._machine)
        self._kernel.check_alive()
        if self._is_closed or (self._is_over and not self._come):
            raise OSError("the connection is closed")

    def _later(self, arrive: Callable[[], None]) -> None:
        """Let something come to the other end, in order, and not through what is cut."""
        network, kernel, source, target = (
            self._network, self._kernel, self._machine, self.peer._machine
        )  # fmt: skip
        if kernel.is_over:
            return

        def come() -> None:
            until_s = network.silent_until_s(source, target, is_store=False)
            if until_s > kernel.now_s + SILENT_S:
                return  # it is lost, and found out by the silence
            if until_s > kernel.now_s:
                kernel.call_at(until_s, come)
                return
            arrive()

        self._last_s = max(self._last_s, kernel.now_s + network.draw_delay_s())
        kernel.call_at(self._last_s, come)

    def _take(self, text: str, data: Tensor) -> None:
        self._come.append((text, data))
        self._notify()

    def _end(self) -> None:
        self._is_over = True
        self._notify()


class StreamListener(_Waitable):
    """A port of a machine: a ``Listener``."""

    def __init__(self, network: CrewNetwork, toward: tuple[str, int]) -> None:
        super().__init__()
        self._network, self._machine = network, _find_machine()
        self._come: list[Stream] = []
        self._is_closed = False
        network.listeners.append(self)
        self.addresses = [[str(self._machine.rank), len(network.listeners)]]
        self.nonce = str(len(network.listeners))

    def accept(self, name: str, sign: Sign, *, limit_s: float) -> Stream:
        try:
            if not self._wait_for(lambda: bool(self._come) or self._is_closed, limit_s):
                raise OSError("timed out")
            if not self._come:
                raise OSError("it is closed")
            return self._come[0]
        finally:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        self._notify()

    def connect(self, machine: CrewMachine) -> Stream:
        """Make both ends of a connection, and return the other one."""
        if self._is_closed or self._machine.is_gone:
            raise OSError("Connection refused")
        own, other = Stream(self._network, self._machine), Stream(self._network, machine)
        own.peer, other.peer = other, own
        self._come.append(own)
        self._notify()
        return other


def make_side_links(network: CrewNetwork) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what stands in for ``Listener`` and ``dial``."""

    def listen(toward: tuple[str, int]) -> StreamListener:
        return StreamListener(network, toward)

    def dial(addresses: Sequence[Sequence[Any]], name: str, sign: Sign, nonce: str) -> Stream:
        kernel, machine = running(), _find_machine()
        network.on_message(machine)
        kernel.sleep(2 * network.draw_delay_s())
        (_, port), *_ = addresses
        listener = network.listeners[port - 1]
        there = listener._machine
        for ends in ((machine, there), (there, machine)):
            if network.silent_until_s(*ends, is_store=False) > kernel.now_s:
                kernel.sleep(_DIAL_S)
                raise OSError("timed out")
        stream: Stream = listener.connect(machine)
        return stream

    return listen, dial

"""What strikes at a message, a request or a commit of a crew."""

from __future__ import annotations

import math
from collections.abc import Callable

from simulation.crews.network import STORE, CrewMachine, CrewNetwork
from simulation.crews.plan import CrewFault, CrewPlan, Phase
from simulation.faults import FRAME
from simulation.network import Bytes, Cut, Machine, Message

AT_WORKER = ("late", "leave", "abandon")
"""Faults that strike between two steps of a worker, which asks for them."""


class CrewInjector:
    """Lets the faults of a plan strike, and remembers which did.

    Args:
        network: Where.
        plan: Which.
        restart: Called with a machine that died and is to be replaced, and after how long.
        give_up: Called with a machine that will not go on.

    Attributes:
        fired: The faults that struck, and when.
    """

    def __init__(
        self,
        network: CrewNetwork,
        plan: CrewPlan,
        *,
        restart: Callable[[CrewMachine, float], None],
        give_up: Callable[[CrewMachine], None],
    ) -> None:
        self._network, self._restart, self._give_up = network, restart, give_up
        self._waiting = list(plan.faults)
        self._stale: set[int] = set()
        self._frames: dict[tuple[int, int], list[tuple[str, Bytes]]] = {}
        self.fired: list[tuple[CrewFault, float]] = []
        network.on_message = network.on_request = self._count
        network.on_send = self._on_send

    def _count(self, machine: Machine) -> None:
        assert isinstance(machine, CrewMachine)
        machine.n_events += 1
        for fault in list(self._waiting):
            is_due = (fault.phase, fault.time) == machine.phase and fault.after < machine.n_events
            if fault.victim == machine.rank and is_due and fault.kind not in AT_WORKER:
                self._fire(fault, machine)

    def note(self, machine: CrewMachine, phase: Phase, number: int = 0) -> None:
        """Note that a worker has committed a step, and how many before, or that it has all."""
        for fault in list(self._waiting):
            is_due = (fault.phase, fault.time) == (phase, number)
            if fault.victim == machine.rank and is_due and fault.kind not in AT_WORKER:
                self._fire(fault, machine)

    def find_own(self, machine: CrewMachine, step: int) -> CrewFault | None:
        """Find what a worker does by itself before a step."""
        for fault in self._waiting:
            if fault.victim == machine.rank and fault.kind in AT_WORKER and fault.time <= step:
                self._waiting.remove(fault)
                self.fired.append((fault, self._network.kernel.now_s))
                return fault
        return None

    def _fire(self, fault: CrewFault, machine: CrewMachine) -> None:
        if machine.is_gone:
            return
        network, now_s = self._network, self._network.kernel.now_s
        self._waiting.remove(fault)
        self.fired.append((fault, now_s))
        network.kernel.tell(machine, f"is struck: {fault}")
        if fault.kind == "die":
            network.end(machine, is_crash=True)
            self._give_up(machine)
            if fault.restarts_after_s is not None:
                self._restart(machine, fault.restarts_after_s)
        elif fault.kind == "stop":
            network.stop(machine, fault.seconds)
            if fault.seconds == math.inf:
                self._give_up(machine)
        elif fault.kind == "stale":
            self._stale.add(machine.rank)
        elif fault.kind == "store" and fault.seconds == math.inf:
            network.lose_store()
        elif fault.kind == "restart":
            if not network.keeper.is_gone:
                network.lose_store()
                network.kernel.call_at(now_s + fault.seconds, network.start_next_store)
        elif fault.kind == "store":
            network.stop(network.keeper, fault.seconds)
        else:
            self._cut(fault)

    def _cut(self, fault: CrewFault) -> None:
        network, here, there = self._network, {fault.victim}, {fault.peer}
        if fault.kind == "unheard":
            there = {STORE}
        if fault.kind == "split":
            here |= set(fault.side)
            there = {machine.rank for machine in network.machines} - here
            there |= {STORE} if fault.holds_for_store else set()
        now_s = network.kernel.now_s
        for one in sorted(here):
            for other in sorted(there):
                if fault.ways != "to":
                    network.cuts.append(Cut(one, other, now_s, now_s + fault.seconds, True))
                if fault.ways != "from":
                    network.cuts.append(Cut(other, one, now_s, now_s + fault.seconds, True))

    def _on_send(self, machine: Machine, rank: int, message: Message) -> Bytes:
        data, group = message.data, next(reversed(machine.groups))
        if data[:4].tobytes() != FRAME:
            return data
        frames = self._frames.setdefault((machine.rank, data.size), [])
        old = [frame for where, frame in frames if where != group]
        frames.append((group, data.copy()))
        if machine.rank in self._stale and old:
            self._stale.discard(machine.rank)
            self._network.kernel.tell(machine, "sends bytes of an earlier epoch")
            return old[-1]
        return data

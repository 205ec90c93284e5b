"""What strikes at a message."""

from __future__ import annotations

import math
from collections.abc import Callable

from simulation.network import Bytes, Cut, Machine, Message, Network
from simulation.plan import MESSAGE_FAULTS, Fault, Plan

FRAME, QUESTION = b"DLio", b"DLas"


class Injector:
    """Lets the faults of a plan strike, and remembers which did.

    Args:
        network: Where.
        plan: Which.
        restart: Called with a machine that died and is to be replaced, and after how long.
        give_up: Called with a rank that will not go on.

    Attributes:
        fired: The faults that struck, and when; those at calls are added by the workers.
    """

    def __init__(
        self,
        network: Network,
        plan: Plan,
        *,
        restart: Callable[[Machine, float], None],
        give_up: Callable[[int], None],
    ) -> None:
        self._network, self._plan = network, plan
        self._restart, self._give_up = restart, give_up
        self._waiting = [fault for fault in plan.faults if fault.kind in MESSAGE_FAULTS]
        self._n_sent: dict[tuple[int, str], int] = {}
        self.fired: list[tuple[Fault, float]] = []
        network.on_message = self._on_message
        network.on_send = self._on_send

    def note(self, fault: Fault) -> None:
        """Note that a fault has struck."""
        self.fired.append((fault, self._network.kernel.now_s))

    def _on_message(self, machine: Machine) -> None:
        number, machine.n_messages = machine.n_messages, machine.n_messages + 1
        for fault in list(self._waiting):
            is_due = fault.victim == machine.rank and fault.at <= number
            if fault.kind != "damage" and is_due and not machine.is_gone:
                self._waiting.remove(fault)
                self.note(fault)
                self._strike(fault, machine)

    def _strike(self, fault: Fault, machine: Machine) -> None:
        network, now_s = self._network, self._network.kernel.now_s
        if fault.kind == "die":
            network.end(machine, is_crash=True)
            self._give_up(machine.rank)
            if fault.restarts_after_s is not None:
                self._restart(machine, fault.restarts_after_s)
        elif fault.kind == "stop":
            network.stop(machine, fault.seconds)
            if fault.seconds == math.inf:
                self._give_up(machine.rank)
        else:
            ways = [(fault.victim, fault.peer), (fault.peer, fault.victim)]
            for source, target in ways if fault.both_ways else ways[:1]:
                until_s = now_s + fault.seconds
                network.cuts.append(Cut(source, target, now_s, until_s, fault.holds_for_store))

    def _on_send(self, machine: Machine, rank: int, message: Message) -> Bytes:
        framing = classify(message)
        number = self._n_sent.get((machine.rank, framing), 0)
        self._n_sent[machine.rank, framing] = number + 1
        for fault in list(self._waiting):
            if (
                fault.kind == "damage"
                and fault.victim == machine.rank
                and fault.framing == framing
                and fault.at == number
            ):
                self._waiting.remove(fault)
                self.note(fault)
                return self._damage(message.data)
        return message.data

    def _damage(self, data: Bytes) -> Bytes:
        """Flip a few bits, or lose a stretch of bytes."""
        chance, damaged = self._network.kernel.random, data.copy()
        if chance.random() < 0.3:
            start = chance.randrange(data.size)
            damaged[start : start + chance.choice((1, 64))] = chance.randrange(256)
        for _ in range(chance.choice((1, 2, 8)) if (damaged == data).all() else 0):
            damaged[chance.randrange(data.size)] ^= 1 << chance.randrange(8)
        if (damaged == data).all():
            damaged[0] ^= 1
        return damaged


def classify(message: Message) -> str:
    """Say what a message is, as far as damage to it is concerned."""
    if message.what == "broadcast":
        return "weights"
    kinds = {FRAME: "frame", QUESTION: "questions"}
    return kinds.get(message.data[:4].tobytes(), "words after a question")

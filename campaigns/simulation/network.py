"""Machines, connections between them, and messages that are late, lost or damaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from simulation.kernel import Kernel, Process
from simulation.store import AgentStore, TCPStore

if TYPE_CHECKING:
    from simulation.groups import End

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

WAKING_S = 0.002
"""Within which a process that was stopped reads what has come meanwhile."""


@dataclass(eq=False)
class Machine(Process):
    """A worker's process, as the network sees it.

    Attributes:
        rank: Its rank.
        n_messages: Messages that it has sent or received: what faults are counted by.
        groups: Its ends of groups.
        lost_after_s: By receiver, from when on messages are lost that were under way as it died.
        limit_s: How long it may go without progress, stopped or computing aside.
        worst_s: How much longer than that it did.
    """

    rank: int = -1
    n_messages: int = 0
    limit_s: float = math.inf
    worst_s: float = -math.inf
    groups: dict[Any, End] = field(default_factory=dict)
    lost_after_s: dict[int, float] = field(default_factory=dict)

    def note_progress(self, now_s: float) -> None:
        """Note that something has begun or ended, and how long that took."""
        self.worst_s = max(self.worst_s, now_s - self.progress_s - self.paused_s - self.limit_s)
        self.progress_s, self.paused_s = now_s, 0.0


@dataclass(frozen=True)
class Cut:
    """One direction that is silent for a while, or for good."""

    source: int
    target: int
    from_s: float
    until_s: float
    holds_for_store: bool


@dataclass(frozen=True)
class Delays:
    """How long messages take, now and then much longer.

    Attributes:
        least_s, most_s: Of a message, uniform.
        straggling_share: Of messages, that take up to ``straggling_s``.
        straggling_s: The longest.
        store_s: The longest for one way to the store.
    """

    least_s: float
    most_s: float
    straggling_share: float = 0.0
    straggling_s: float = 0.0
    store_s: float = 0.002


@dataclass(frozen=True)
class Message:
    """What one member of a group sends to another: for which collective, and which one of those."""

    what: str
    number: int
    data: Bytes


class Network:
    """Everything between the workers.

    Args:
        kernel: The clock.
        size: Workers.
        delays: Of messages.
        has_agent: Whether an agent keeps the store, and not rank 0.

    Attributes:
        machines: By rank.
        cuts: Directions that are silent.
        on_message: Called before each message that a machine sends or receives.
        on_send: May return other bytes than those that are sent.
        store: What the store holds.
        meetings: By group, the machine of each member that has come to make it.
    """

    def __init__(self, kernel: Kernel, size: int, delays: Delays, *, has_agent: bool) -> None:
        self.kernel, self.delays = kernel, delays
        self.machines = [Machine(f"rank {rank}", rank=rank) for rank in range(size)]
        self.cuts: list[Cut] = []
        self.on_message: Callable[[Machine], None] = lambda machine: None
        self.on_send: Callable[[Machine, int, Message], Bytes] = lambda _, __, sent: sent.data
        self.store: dict[str, bytes] = {}
        self.meetings: dict[str, dict[int, int]] = {}
        self._has_agent = has_agent

    def connect_store(self, machine: Machine) -> TCPStore:
        """Return a machine's connection to the store."""
        if self._has_agent:
            return AgentStore(self, machine, None)
        return TCPStore(self, machine, self.machines[0])

    @property
    def store_host(self) -> Machine | None:
        """The machine that keeps the store."""
        return None if self._has_agent else self.machines[0]

    def draw_store_delay_s(self) -> float:
        """Draw how long one way to the store takes."""
        return self.kernel.random.uniform(0.1, 1.0) * self.delays.store_s

    def draw_delay_s(self) -> float:
        """Draw how long a message takes."""
        delays, chance = self.delays, self.kernel.random
        if delays.straggling_share and chance.random() < delays.straggling_share:
            return chance.uniform(delays.most_s, delays.straggling_s)
        return chance.uniform(delays.least_s, delays.most_s)

    def silent_until_s(self, source: Machine, target: Machine, *, is_store: bool) -> float:
        """Return until when nothing gets from one machine to another; 0 where it does."""
        now_s = self.kernel.now_s
        return max(
            (
                cut.until_s
                for cut in self.cuts
                if (cut.source, cut.target) == (source.rank, target.rank)
                and cut.from_s <= now_s < cut.until_s
                and (cut.holds_for_store or not is_store)
            ),
            default=0.0,
        )

    def stop(self, machine: Machine, seconds: float) -> None:
        """Let none of a machine's tasks run for a while."""
        until_s = self.kernel.now_s + seconds
        self.kernel.tell(machine, f"is stopped for {seconds:g} s")
        if until_s > machine.stopped_until_s:
            begin_s = max(self.kernel.now_s, machine.stopped_until_s)
            machine.paused_s += until_s - begin_s
            machine.stopped_until_s = until_s

    def end(self, machine: Machine, *, is_crash: bool) -> None:
        """Take a machine away and close its connections.

        Args:
            machine: The one that ends.
            is_crash: Whether what it has under way may be lost, as when a process is killed that
                has not read all that it got.
        """
        if machine.is_gone:
            return
        kernel = self.kernel
        kernel.tell(machine, "dies" if is_crash else "ends")
        if is_crash:
            for peer in self.machines:
                if kernel.random.random() < 0.5:
                    machine.lost_after_s[peer.rank] = kernel.now_s + self.draw_delay_s() / 2
        kernel.end_process(machine)
        for end in machine.groups.values():
            for rank in end.ranks:
                if rank != machine.rank:
                    end.close_to(self.machines[rank])

"""Machines of a crew, one of which keeps the store, and the connections to it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from simulation.kernel import Kernel
from simulation.network import WAKING_S, Delays, Machine, Network
from simulation.stand_ins import Future, Lock

if TYPE_CHECKING:
    from simulation.crews.streams import Stream, StreamListener
    from simulation.groups import End

STORE = -1
"""In place of a rank: the machine that keeps the store."""

SILENT_S = 120.0
"""How long a request may go without an answer before its connection breaks."""

Data = dict[str, bytes]


@dataclass(eq=False)
class CrewMachine(Machine):
    """A worker's process.

    Attributes:
        clock_skew_s: How much later it is by its clock.
        phase: What it is at, "forming" or "training", and how often it was before.
        n_events: Messages and requests since then.
        world: Its end of the default group.
        n_groups: Groups that it has begun to make since it gave the last one up.
    """

    clock_skew_s: float = 0.0
    phase: tuple[str, int] = ("forming", 0)
    n_events: int = 0
    world: Any = None
    n_groups: int = 0

    def begin(self, phase: str, number: int) -> None:
        """Note that a phase begins."""
        self.phase, self.n_events = (phase, number), 0


class CrewNetwork(Network):
    """Everything between the workers, and between them and the store.

    Args:
        kernel: The clock.
        delays: Of messages.

    Attributes:
        keeper: The machine that keeps the store.
        on_request: Called before each request to the store.
        streams, listeners: Ends of connections beside groups, and ports for them.
        n_stores: Stores before the present one, each of which began empty.
    """

    def __init__(self, kernel: Kernel, delays: Delays) -> None:
        super().__init__(kernel, 0, delays, has_agent=True)
        self.keeper = Machine("store", rank=STORE)
        self.on_request: Callable[[Machine], None] = lambda machine: None
        self.streams: list[Stream] = []
        self.listeners: list[StreamListener] = []
        self.n_stores = 0
        self._asked: list[tuple[CrewMachine, Future]] = []
        self._waiting: list[tuple[Sequence[str], Callable[[], None]]] = []

    def add_machine(self, name: str, clock_skew_s: float) -> CrewMachine:
        """Add a machine; its rank is its number among all."""
        machine = CrewMachine(name, rank=len(self.machines), clock_skew_s=clock_skew_s)
        self.machines.append(machine)
        return machine

    def end(self, machine: Machine, *, is_crash: bool) -> None:
        """Take a machine away and close its connections."""
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
            self.close(end)
        for stream in self.streams:
            if isinstance(machine, CrewMachine):
                stream.lose(machine)

    def close(self, end: End) -> None:
        """Close a machine's connections of one group."""
        for peer in self.machines:
            if peer is not end.machine and end.key in peer.groups:
                end.close_to(peer)

    def lose_store(self) -> None:
        """End the process that keeps the store."""
        self.kernel.tell(self.keeper, "dies")
        self.keeper.is_gone = True
        self._waiting.clear()
        for machine, answer in self._asked:
            self._refuse(machine, answer)

    def start_next_store(self) -> None:
        """Start an empty store in place of the one that died."""
        self.kernel.tell(self.keeper, "is started again, empty")
        self.keeper.is_gone = False
        self.n_stores += 1
        self.store.clear()

    def ask(
        self,
        machine: CrewMachine,
        under_way: deque[Callable[[], None]],
        action: Callable[[Data], Any],
        keys: Sequence[str] = (),
        *,
        n_stores: int = 0,
    ) -> Future:
        """Send a request to the store; what is under way may get there although the sender died.

        Args:
            machine: Who asks.
            under_way: Requests of this connection, which arrive in their order.
            action: What the store does.
            keys: What must be there before.
            n_stores: Stores before the one that the connection is to.
        """
        answer = Future()
        self._asked = [(asker, other) for asker, other in self._asked if not other.done()]
        self._asked.append((machine, answer))
        under_way.append(partial(self._serve, machine, action, keys, answer))
        arrive = partial(self._arrive, machine, under_way, answer, n_stores)
        self.kernel.call_at(self.kernel.now_s + self.draw_store_delay_s(), arrive)
        return answer

    def _arrive(
        self,
        machine: CrewMachine,
        under_way: deque[Callable[[], None]],
        answer: Future,
        n_stores: int,
    ) -> None:
        kernel = self.kernel
        silent_s = self.silent_until_s(machine, self.keeper, is_store=True)
        later_s = max(silent_s, self.keeper.stopped_until_s)
        if later_s > kernel.now_s:
            if later_s < math.inf:
                again = partial(self._arrive, machine, under_way, answer, n_stores)
                kernel.call_at(later_s + kernel.random.random() * WAKING_S, again)
        elif self.keeper.is_gone or n_stores != self.n_stores:
            self._refuse(machine, answer)
        elif machine.is_gone and kernel.random.random() < 0.5:
            under_way.clear()  # and with it what follows
        elif under_way:
            under_way.popleft()()

    def _serve(
        self,
        machine: CrewMachine,
        action: Callable[[Data], Any],
        keys: Sequence[str],
        answer: Future,
    ) -> None:
        if any(key not in self.store for key in keys):
            self._waiting.append((keys, partial(self._serve, machine, action, keys, answer)))
            return
        self._reply(machine, answer, partial(answer.set_result, action(self.store)))
        ready = [call for wanted, call in self._waiting if all(k in self.store for k in wanted)]
        if ready:
            self._waiting = [(wanted, call) for wanted, call in self._waiting if call not in ready]
            for call in ready:
                call()

    def _refuse(self, machine: CrewMachine, answer: Future) -> None:
        error = dist.DistNetworkError("failed to recv, got 0 bytes: connection was closed")
        self._reply(machine, answer, partial(answer.set_exception, error))

    def _reply(self, machine: CrewMachine, answer: Future, come: Callable[[], None]) -> None:
        arrive = partial(self._bring, machine, answer, come)
        self.kernel.call_at(self.kernel.now_s + self.draw_store_delay_s(), arrive)

    def _bring(self, machine: CrewMachine, answer: Future, come: Callable[[], None]) -> None:
        kernel = self.kernel
        silent_s = self.silent_until_s(self.keeper, machine, is_store=True)
        if silent_s > kernel.now_s:
            if silent_s < math.inf:
                again = partial(self._bring, machine, answer, come)
                kernel.call_at(silent_s + kernel.random.random() * WAKING_S, again)
            return
        if not answer.done():  # a reply that was under way as the store died
            come()


class CrewStore:
    """One connection of a worker to the store, with one request at a time: a ``TCPStore``.

    Args:
        network: Where it is.
        machine: The worker.
        timeout_s: How long ``get`` waits for its key.

    Raises:
        DistNetworkError: No store answers.
    """

    path = ""

    def __init__(self, network: CrewNetwork, machine: CrewMachine, timeout_s: float) -> None:
        self._network, self._machine, self._timeout_s = network, machine, timeout_s
        self._lock, self._is_broken = Lock(), False
        self._n_stores = network.n_stores
        self.counts = True  # whether moments of faults are counted by its requests
        self._under_way: deque[Callable[[], None]] = deque()
        kernel = network.kernel
        deadline_s = kernel.now_s + timeout_s
        try:
            self._ask("is connected to", lambda data: None, limit_s=timeout_s)
        except dist.DistNetworkError as error:
            kernel.sleep(deadline_s - kernel.now_s)  # it tries again until then
            raise dist.DistNetworkError("The client socket has timed out") from error

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def check(self, keys: Sequence[str]) -> bool:
        return bool(
            self._ask(f"looks for {', '.join(keys)}", lambda data: all(key in data for key in keys))
        )

    def set(self, key: str, value: str | bytes) -> None:
        def change(data: Data) -> None:
            data[key] = value.encode() if isinstance(value, str) else value

        self._ask(f"sets {key} to {_shorten(value)}", change, waits=False)

    def get(self, key: str, limit_s: float | None = None) -> bytes:
        limit_s = self._timeout_s if limit_s is None else limit_s
        found: bytes = self._ask(f"gets {key}", lambda data: data[key], (key,), limit_s=limit_s)
        return found

    def add(self, key: str, amount: int) -> int:
        def change(data: Data) -> int:
            total = int(data.get(key, b"0")) + amount
            data[key] = str(total).encode()
            return total

        return int(self._ask(f"adds to {key}", change))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        def change(data: Data) -> bytes:
            if key not in data and expected:
                return expected.encode()
            if data.get(key, b"") == expected.encode():
                data[key] = value.encode()
            return data[key]

        found: bytes = self._ask(f"compares and sets {key}", change)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(f"deletes {key}", lambda data: data.pop(key, None)))

    def _ask(
        self,
        what: str,
        action: Callable[[Data], Any],
        keys: Sequence[str] = (),
        *,
        limit_s: float = SILENT_S,
        waits: bool = True,
    ) -> Any:
        """Send a request; wait for its answer, unless it has none."""
        network, machine, kernel = self._network, self._machine, self._network.kernel
        if self.counts:
            network.on_request(machine)
        kernel.check_alive()
        if machine.stopped_until_s > kernel.now_s:
            kernel.sleep(0)
        with self._lock:
            if self._is_broken:
                raise dist.DistNetworkError("Broken pipe")
            answer = network.ask(machine, self._under_way, action, keys, n_stores=self._n_stores)
            try:
                result = answer.result(limit_s) if waits else None
            except FutureTimeoutError:
                kernel.tell(machine, f"store: {what} in vain")
                if keys:
                    raise dist.DistStoreError(f"wait timeout after {limit_s:g} s") from None
                self._is_broken = True
                raise dist.DistNetworkError("Connection timed out") from None
            except dist.DistNetworkError:
                kernel.tell(machine, f"store: {what}, and it is gone")
                self._is_broken = True
                raise
        kernel.tell(machine, f"store: {what}{'' if result is None else f': {_shorten(result)}'}")
        return result


def _shorten(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) < 400 else "much"

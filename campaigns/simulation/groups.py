"""Groups of machines and their collectives, as ``torch.distributed`` shows them to the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from simulation.network import WAKING_S, Bytes, Machine, Message, Network
from simulation.store import TCPStore


class Work:
    """A collective under way on one machine, as ``torch.distributed`` returns it."""

    def __init__(self, end: End, what: str, number: int, sinks: dict[int, Bytes]) -> None:
        self.what, self.number = what, number
        self._end, self._sinks = end, sinks
        self._error: str | None = None
        self._waiting: list[Any] = []

    @property
    def missing(self) -> set[int]:
        """Of whom nothing has come yet."""
        return set(self._sinks)

    def is_completed(self) -> bool:
        return self._error is not None or not self._sinks

    def wait(self, timeout: Any = None) -> bool:
        kernel = self._end.network.kernel
        kernel.check_alive()
        deadline_s = math.inf if timeout is None else kernel.now_s + timeout.total_seconds()
        while not self.is_completed():
            if kernel.now_s >= deadline_s:
                raise RuntimeError(f"Timed out waiting {timeout} for the work to complete")
            self._waiting.append(kernel.current)
            kernel.wait(None if deadline_s == math.inf else deadline_s)
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def take(self, rank: int, message: Message) -> None:
        """Take what a member has sent."""
        sink = self._sinks[rank]
        if message.what != self.what or message.data.size != sink.size:
            self._end.network.kernel.trouble.append(
                f"collectives are mixed up: rank {self._end.machine.rank} takes part in {self.what}"
                f" of {sink.size} bytes, rank {rank} in {message.what} of {message.data.size}"
            )
            self.fail("Mismatch of collectives")
            return
        sink[:] = message.data
        del self._sinks[rank]
        if not self._sinks:
            self._tell("ends")
            self._notify()

    def fail(self, reason: str) -> None:
        """End without a result."""
        if not self.is_completed():
            self._tell(f"fails: {reason}")
            self._error = reason
            self._notify()

    def _tell(self, text: str) -> None:
        end = self._end
        end.network.kernel.tell(end.machine, f"{self.what} {self.number} of {end.key} {text}")

    def _notify(self) -> None:
        kernel = self._end.network.kernel
        self._end.machine.note_progress(kernel.now_s)
        for task in self._waiting:
            kernel.wake(task)
        self._waiting.clear()


class End:
    """One machine's end of a group: what ``torch.distributed`` calls a process group.

    Args:
        network: Where it is.
        machine: The member.
        key: What all ends of the group share.
        ranks: Its members, by number; empty until they are known.
        timeout_s: How long the transport itself lets a collective take; None for no limit.
    """

    group_name = "0"

    def __init__(
        self,
        network: Network,
        machine: Machine,
        key: Any,
        *,
        ranks: tuple[int, ...] = (),
        timeout_s: float | None = None,
    ) -> None:
        self.network, self.machine, self.key, self.ranks = network, machine, key, ranks
        self.timeout_s = timeout_s
        self._store = network.connect_store(machine)
        self.n_begun = 0
        self._early: dict[tuple[int, int], Message] = {}
        self._works: list[Work] = []
        self._closed: set[int] = set()
        self._last_arrival_s: dict[int, float] = {}
        machine.groups[key] = self

    def rank(self) -> int:
        return self.ranks.index(self.machine.rank)

    def size(self) -> int:
        return len(self.ranks)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Links have timeouts of their own."""

    def get_group_store(self) -> TCPStore:
        return self._store

    def alltoall_base(
        self, out: Tensor, chunks: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        sent = dict(zip(self.ranks, self._split(chunks, sizes), strict=True))
        sinks = dict(zip(self.ranks, self._split(out, out_sizes), strict=True))
        return self.begin("all-to-all", sent, sinks)

    def _allgather_base(self, out: Tensor, chunk: Tensor) -> Work:
        sinks = dict(zip(self.ranks, self._split(out, ()), strict=True))
        return self.begin("all-gather", dict.fromkeys(self.ranks, _bytes_of(chunk)), sinks)

    def gather(self, rows: list[list[Tensor]], chunks: list[Tensor], options: Any) -> Work:
        sinks = {}
        if rows:
            sinks = dict(zip(self.ranks, map(_bytes_of, rows[0]), strict=True))
        return self.begin("gather", {self.ranks[options.rootRank]: _bytes_of(chunks[0])}, sinks)

    def scatter(self, outs: list[Tensor], rows: list[list[Tensor]], options: Any) -> Work:
        sent = {}
        if rows:
            sent = dict(zip(self.ranks, map(_bytes_of, rows[0]), strict=True))
        return self.begin("scatter", sent, {self.ranks[options.rootRank]: _bytes_of(outs[0])})

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        source, data = self.ranks[options.rootRank], _bytes_of(tensors[0])
        if self.machine.rank == source:
            return self.begin("broadcast", dict.fromkeys(self.ranks, data), {})
        return self.begin("broadcast", {}, {source: data})

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> list[Bytes]:
        """Cut a tensor into a part for each member, equal ones without ``sizes`` in elements."""
        data, unit = _bytes_of(tensor), tensor.element_size()
        parts = sizes or [tensor.numel() // self.size()] * self.size()
        ends = [unit * end for end in accumulate(parts)]
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def begin(self, what: str, sent: dict[int, Bytes], sinks: dict[int, Bytes]) -> Work:
        """Begin a collective.

        Args:
            what: Its name.
            sent: By member, what goes there.
            sinks: By member, where what comes from there is to be written.
        """
        kernel = self.network.kernel
        kernel.check_alive()
        number, self.n_begun = self.n_begun, self.n_begun + 1
        self.machine.note_progress(kernel.now_s)
        own = self.machine.rank
        if own in sinks:
            sinks.pop(own)[:] = sent[own]
        work = Work(self, what, number, sinks)
        kernel.tell(self.machine, f"{what} {number} of {self.key} begins")
        targets = [rank for rank in sent if rank != own]
        kernel.random.shuffle(targets)
        for rank in targets:
            self._send(rank, Message(what, number, sent[rank].copy()))
        broken = self._closed & (work.missing.union(targets))
        broken -= {rank for rank in broken if (rank, number) in self._early}
        if broken and kernel.random.random() < 0.2:
            raise RuntimeError(f"Connection closed by peer [{min(broken)}]")
        self._works = [earlier for earlier in self._works if not earlier.is_completed()] + [work]
        for rank in sorted(work.missing):
            message = self._early.pop((rank, number), None)
            if message is not None:
                work.take(rank, message)
        if broken:
            work.fail(f"Connection closed by peer [{min(broken)}]")
        if self.timeout_s is not None:
            self._limit(work, self.timeout_s)
        return work

    def _limit(self, work: Work, timeout_s: float) -> None:
        """Let the transport give a collective up after a while."""
        kernel = self.network.kernel
        kernel.call_at(kernel.now_s + timeout_s, partial(self._expire, work, timeout_s))

    def _expire(self, work: Work, timeout_s: float) -> None:
        kernel, until_s = self.network.kernel, self.machine.stopped_until_s
        if until_s > kernel.now_s:
            kernel.call_at(until_s, partial(self._expire, work, timeout_s))
            return
        work.fail(f"Timed out waiting {timeout_s * 1000:g}ms for recv operation to complete")

    def _send(self, rank: int, message: Message) -> None:
        network, machine = self.network, self.machine
        network.on_message(machine)
        network.kernel.check_alive()
        if machine.stopped_until_s > network.kernel.now_s:
            network.kernel.sleep(0)
        data = network.on_send(machine, rank, message)
        message = Message(message.what, message.number, data)
        target = network.machines[rank]
        arrival_s = max(
            network.kernel.now_s + network.draw_delay_s(), self._last_arrival_s.get(rank, 0.0)
        )
        self._last_arrival_s[rank] = arrival_s

        def arrive() -> None:
            if not target.is_gone and self.key in target.groups:
                target.groups[self.key].receive(machine.rank, message)

        def come() -> None:
            if machine.lost_after_s.get(rank, math.inf) > arrival_s:
                network.on_message(target)  # which may stop it before it has read this
                self._deliver_at(network.kernel.now_s, target, arrive)

        self._deliver_at(arrival_s, target, come)

    def close_to(self, target: Machine) -> None:
        """Let a member know that this machine is gone, after all that it has sent."""
        delay_s = self.network.draw_delay_s()
        last_s = self._last_arrival_s.get(target.rank, 0.0)
        arrival_s = max(self.network.kernel.now_s + delay_s, last_s) + WAKING_S

        def arrive() -> None:
            if self.key in target.groups:
                target.groups[self.key].lose(self.machine.rank)

        self._deliver_at(arrival_s, target, arrive, is_last=True)

    def _deliver_at(
        self, time_s: float, target: Machine, arrive: Callable[[], None], *, is_last: bool = False
    ) -> None:
        """Let something arrive, once the way is free and the target runs."""
        self.network.kernel.call_at(time_s, partial(self._deliver, target, arrive, is_last))

    def _deliver(self, target: Machine, arrive: Callable[[], None], is_last: bool) -> None:
        kernel = self.network.kernel
        silent_s = self.network.silent_until_s(self.machine, target, is_store=False)
        later_s = max(silent_s, target.stopped_until_s)
        if target.is_gone or later_s == math.inf:
            return
        if later_s > kernel.now_s:
            # A connection that was closed says so after all that it has brought.
            share = 1.0 if is_last else kernel.random.random() / 2
            later_s += share * WAKING_S
            self._deliver_at(later_s, target, arrive, is_last=is_last)
            return
        arrive()

    def receive(self, rank: int, message: Message) -> None:
        """Take a message to the collective that it belongs to, or keep it for that."""
        for work in self._works:
            if work.number == message.number:
                if rank in work.missing and not work.is_completed():
                    work.take(rank, message)
                return
        self._early[rank, message.number] = message

    def lose(self, rank: int) -> None:
        """Note that a member has closed its connection."""
        self._closed.add(rank)
        for work in self._works:
            if rank in work.missing:
                work.fail(f"Connection closed by peer [{rank}]")


def _bytes_of(tensor: Tensor) -> Bytes:
    return cast(Bytes, tensor.detach().view(-1).view(torch.uint8).numpy())

"""A process group with a deadline, a byte counter and errors that name the step."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import (
    PeerLostError,
    ProcessGroupError,
    StepError,
    StepMismatchError,
    StepTimeoutError,
)
from distlion.exchange.finding import FailureKind, Finding
from distlion.exchange.watch import READ_S, PeerWatch, keep_forever, within
from distlion.kernels import choose_kernels

_INCREASE, _DECREASE = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef

HOST = torch.device("cpu")

# How often a wait looks for another worker's alarm.
LOOK_S = 0.1
# 4 hosts: 33 KB at 1 Gbit/s 2.0 ms against 2.7 along the ring, 262 KB at 100 Mbit/s 78 against 68.
MOST_BYTES_AT_ONCE = 64 * 1024
# 2 hosts, 1 MB: a step took 198 ms instead of 235 at 100 Mbit/s, 115 instead of 120 at 1 Gbit/s.
LEAST_BYTES_TO_MEET = 256 * 1024
ONE_ROUND = 1
"""Of an all-to-all, a gather or a scatter: Gloo starts all messages at once (gloo/alltoall.cc)."""


def all_gather_rounds(n_workers: int, chunk_bytes: int) -> int:
    """Count the rounds of an all-gather: Gloo passes large chunks along a ring (gloo/allgather.cc).

    ``Link.all_gather`` sends small ones to everybody at once.
    """
    return ONE_ROUND if chunk_bytes <= MOST_BYTES_AT_ONCE else n_workers - 1


@dataclass(frozen=True)
class ByteCount:
    """Bytes and messages of one rank; what it sends to itself is not in it.

    Attributes:
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        messages: Messages sent.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    def __add__(self, other: ByteCount) -> ByteCount:
        return ByteCount(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.messages + other.messages,
        )


class Transfer:
    """A collective that is under way; what it overwrites has no meaning before ``wait`` is over.

    Args:
        link: Where it runs.
        start: Starts it.
        sent: What it hands to the network.
        step: The step that errors name; None for none.
        what: What it is called in errors.

    Raises:
        PeerLostError: A peer's connection closed.
        StepTimeoutError: A peer did not answer in time.
    """

    def __init__(
        self,
        link: Link,
        start: Callable[[], dist.Work | None],
        sent: ByteCount,
        *,
        step: int | None,
        what: str,
    ) -> None:
        self._link, self._step, self._what = link, step, what
        # Whoever lets go of a group waits for what is under way on it, perhaps for ever: it is kept
        # until this has ended, also where nobody waits for that any more.
        _INCREASE(ctypes.py_object(link.process_group))
        self._is_under_way = True
        try:
            self._work = start()
        except RuntimeError as error:
            raise link.broken(error, step, what) from error
        self._start_s = time.monotonic()
        link.n_under_way += 1
        link.counted += sent

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            PeerLostError: A peer's connection closed.
            StepTimeoutError: It had no end in time.
        """
        link, watch = self._link, self._link.watch
        try:
            try:
                has_ended = self._has_ended()
            except RuntimeError as error:
                raise link.broken(error, self._step, self._what) from error
            if not has_ended:
                passed_s = time.monotonic() - self._start_s
                how = f"the {self._what} had no end in {passed_s:.1f} s"
                raise link.failure("silent", self._step, how)
            if self._is_under_way:
                self._is_under_way = False
                link.n_under_way -= 1
                _DECREASE(ctypes.py_object(link.process_group))
            # What others sent before they gave this worker up has waited for it in its sockets.
            if watch is not None and watch.is_given_up(link.timeout_s):
                how = f"this worker came too late to the {self._what}"
                raise link.failure("silent", self._step, how)
        finally:
            if watch is not None:
                watch.leave_exchange(self)

    def _has_ended(self) -> bool:
        """Wait for the end; False where it has none in time, or a peer failed."""
        work, link = self._work, self._link
        if link.watch is not None:  # others may ask whether this worker has come to the exchange
            link.watch.enter_exchange(self)
        if work is None:
            return True
        deadline_s = time.monotonic() + link.timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                # Below a millisecond would be 0, and that is for ever.
                work.wait(timedelta(seconds=max(0.001, min(left_s, LOOK_S))))
            except RuntimeError:
                if not work.is_completed():
                    if link.watch is not None and link.watch.alarmed.is_set():
                        return False
                    continue
                work.wait()  # raises what happened, unless the end came just now
            return True
        return False


class Link:
    """The collectives that patterns use, over one process group.

    Each begins at once and returns a ``Transfer``; several may be under way. All members begin the
    same ones in the same order.

    What it carries lies in host memory, wherever the parameters are: that is where frames are
    checked and votes are counted. ``wire_device`` is the one name for that place.

    Args:
        process_group: The workers; this process is one of them.
        timeout_s: How long one collective may take.
        ranks: The rank of each member among all workers that vote, which errors name; None for its
            rank in the group.
        watch: What finds out which of all these workers failed; None to go without.
        limits: Which arguments set its limit, for errors.

    Attributes:
        wire_device: Where the tensors on the wire live.
        kernels: The arithmetic there.
        rank: This process among the members.
        world_size: Number of members.
        counted: What was handed to the network since ``take_counted``.
        n_under_way: Collectives that have begun and that nobody has waited for.

    Raises:
        ProcessGroupError: The group cannot carry them.
        KernelBackendError: There are no kernels for the host.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        watch: PeerWatch | None = None,
        limits: str = "step_timeout_s= sets the limit, init_timeout_s= that of construction",
    ) -> None:
        self.process_group = process_group
        self.wire_device = HOST
        self.kernels = choose_kernels(self.wire_device)
        self.timeout_s = timeout_s
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.ranks = tuple(range(self.world_size) if ranks is None else ranks)
        self.watch, self._limits = watch, limits
        self.counted = ByteCount()
        self.n_under_way = 0
        if not carries_host_memory(process_group):
            raise ProcessGroupError(
                f"the process group ({dist.get_backend_config(process_group)}) cannot carry host "
                "memory; pass backend='cpu:gloo,cuda:nccl' to init_process_group"
            )

    def empty(self, *shape: int) -> Tensor:
        """Allocate uninitialized uint8 on the wire's device."""
        return torch.empty(shape, dtype=torch.uint8, device=self.wire_device)

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int | None) -> Transfer:
        """Send chunk i to member i; ``out`` and ``chunks`` are (world_size, n) uint8."""
        self._meet(chunks[0].nbytes, step=step)
        peers = self.world_size - 1
        n_bytes = peers * chunks[0].nbytes
        sent = ByteCount(n_bytes, n_bytes, peers)
        return self._begin_all_to_all(out, chunks, sent, step=step)

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int | None) -> Transfer:
        """Send ``chunk`` (n,) to every member; ``out`` is (world_size, n), of the same dtype."""
        if self.gathers_at_once(chunk.nbytes):
            chunks = chunk.expand(self.world_size, -1).contiguous()
            return self.all_to_all(out, chunks, step=step)
        self._meet(chunk.nbytes, step=step)
        peers = self.world_size - 1
        start = partial(self.process_group._allgather_base, out.view(-1), chunk)
        sent = ByteCount(peers * chunk.nbytes, peers * chunk.nbytes, peers)
        return Transfer(self, start, sent, step=step, what="all-gather")

    def _begin_all_to_all(
        self, out: Tensor, chunks: Tensor, sent: ByteCount, *, step: int | None
    ) -> Transfer:
        start = partial(self.process_group.alltoall_base, out, chunks, [], [])
        return Transfer(self, start, sent, step=step, what="all-to-all")

    def _meet(self, chunk_bytes: int, *, step: int | None) -> None:
        """Wait for all members, where what follows is large and nothing is under way.

        Gloo lets a worker send before it says that it is ready to receive. Of two workers, the one
        that comes later would find the other one ready, and its own word would queue behind all
        that it sends: only then the other one's bytes would leave. A byte to each member comes
        first, which, as Gloo's own words, is not counted.
        """
        if chunk_bytes < LEAST_BYTES_TO_MEET or self.n_under_way:
            return
        heard, said = (torch.zeros(self.world_size, 1, dtype=torch.uint8) for _ in range(2))
        self._begin_all_to_all(heard, said, ByteCount(), step=step).wait()

    def gathers_at_once(self, chunk_bytes: int) -> bool:
        """Return whether an all-gather sends to all members at once, not along a ring.

        Gloo's ring takes world_size - 1 rounds, one after the other, which is slow for chunks that
        cost little more than a round; large ones collide on their way to one receiver.
        """
        return self.wire_device.type == "cpu" and chunk_bytes <= MOST_BYTES_AT_ONCE

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int | None) -> Transfer:
        """Send ``chunk`` (n,) to the first member; only that one gives ``out``, (world_size, n)."""
        rows = [] if out is None else [list(out)]
        start = partial(self.process_group.gather, rows, [chunk], _from(0, dist.GatherOptions()))
        sent = ByteCount(chunk.nbytes, 0, 1)
        if out is not None:
            sent = ByteCount(0, (self.world_size - 1) * chunk.nbytes, 0)
        return Transfer(self, start, sent, step=step, what="gather")

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int | None) -> Transfer:
        """Receive ``out`` (n,) from the first member; only that one gives (world_size, n)."""
        rows = [] if chunks is None else [list(chunks)]
        start = partial(self.process_group.scatter, [out], rows, _from(0, dist.ScatterOptions()))
        sent = ByteCount(0, out.nbytes, 0)
        if chunks is not None:
            peers = self.world_size - 1
            sent = ByteCount(peers * out.nbytes, 0, peers)
        return Transfer(self, start, sent, step=step, what="scatter")

    def broadcast(self, tensor: Tensor, *, step: int | None, source: int = 0) -> Transfer:
        """Overwrite ``tensor`` with that of a rank of the link; not counted."""
        options = _from(source, dist.BroadcastOptions())
        start = partial(self.process_group.broadcast, [tensor], options)
        return Transfer(self, start, ByteCount(), step=step, what="broadcast")

    def take_counted(self) -> ByteCount:
        """Return what was handed to the network since the last call, and start again from 0."""
        counted, self.counted = self.counted, ByteCount()
        return counted

    def broken(self, error: RuntimeError, step: int | None, what: str) -> StepError:
        """Turn what the transport raised into an error that says who failed."""
        reason = tidy(error)
        kind: FailureKind = "silent" if "timed out" in reason.lower() else "lost"
        return self.failure(kind, step, f"the {what} failed ({reason})")

    def check_present(self, *, step: int | None) -> None:
        """Check that nobody has left, before a wait in which nobody would hear of it.

        Raises:
            PeerLostError: Somebody has.
        """
        left = None
        if self.watch is not None:
            with suppress(RuntimeError):  # a store that is gone, or silent, says nothing
                left = within(READ_S, self.watch.read_left)
        if left is not None:
            raise self.failure("left", step, "workers cannot connect")

    def failure(self, kind: FailureKind, step: int | None, what: str) -> StepError:
        """Find out who failed, for an error; the group is of no use from here on."""
        keep_forever(self.process_group)
        found = Finding(kind) if self.watch is None else self.watch.settle(kind)
        text = _explain(found, self.ranks[self.rank], self._limits)
        if found.kind != "order":
            text = f"{what}: {text}"
        return _ERRORS[found.kind](
            f"{text}; nothing was committed here",
            rank=self.ranks[self.rank],
            step=step,
            culprits=found.culprits,
        )


def carries_host_memory(process_group: dist.ProcessGroup) -> bool:
    """Return whether a group carries tensors of the CPU; one made for NCCL alone does not."""
    backends = f"{HOST.type}:gloo"  # what torch does not know is a Gloo group of ours
    if isinstance(process_group, dist.ProcessGroup):
        backends = str(dist.get_backend_config(process_group))
    return any(backend.startswith(f"{HOST.type}:") for backend in backends.split(","))


def gather_bytes(link: Link, data: bytes, *, step: int | None) -> list[bytes]:
    """Gather ``data``, of equal length on all ranks, in rank order."""
    # A clone: Gloo's thread, which lets go of it last, could not free Python's memory at exit.
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
    everybody = link.empty(link.world_size, len(data))
    link.all_gather(everybody, own, step=step).wait()
    return [bytes(row.numpy()) for row in everybody]


def tidy(error: Exception) -> str:
    """Say what torch says of an error: a sentence, without the source path that Gloo opens with."""
    sentence = str(error).split("\n")[0].split(". ")[0]
    return re.sub(r"\[[^\[\]]*\.(cc|cpp|h|hpp):\d+\]\s*", "", sentence)


def _from(root: int, options: Any) -> Any:
    """Let the options of a collective name a member of the group as its root."""
    options.rootRank = root
    return options


_ERRORS: dict[FailureKind, type[StepError]] = {
    "lost": PeerLostError,
    "silent": StepTimeoutError,
    "order": StepMismatchError,
    "left": PeerLostError,
}


def _explain(found: Finding, own: int, limits: str) -> str:
    if found.kind == "order":
        return (
            f"workers called their optimizers in different orders: {found.note}; every worker must "
            "make the same calls of all its optimizers, in the same order"
        )
    names = ", ".join(f"rank {rank}" for rank in found.culprits) or "a peer"
    if own in found.culprits:
        return "the other workers heard nothing of this one for too long, and gave it up"
    if found.busy:
        text = (
            f"{names} runs, but did not come to the exchange; is it slower than the limit, or has "
            f"it left the training loop? {limits}"
        )
    elif found.kind == "silent":
        text = (
            f"{names} does not answer; is the process stopped, its machine or network down, or "
            f"did it not make this call? {limits}"
        )
    elif found.kind == "left":
        text = f"{names} left, and is waited for no more; look at its log"
    else:
        text = f"{names} is gone; look at its log"
    return f"{text} ({found.note})" if found.note else text

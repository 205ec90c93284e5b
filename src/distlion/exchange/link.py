"""A process group with a deadline, a byte counter and errors that name the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import PeerLostError, ProcessGroupError, StepTimeoutError
from distlion.exchange.watch import FailureKind, Finding, PeerWatch, keep_forever
from distlion.kernels import choose_kernels

# all_gather_into_tensor became all_gather_single in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# How often a wait looks for another worker's alarm.
LOOK_S = 0.1
# 4 hosts: 33 KB at 1 Gbit/s 2.0 ms against 2.7 along the ring, 262 KB at 100 Mbit/s 78 against 68.
MOST_BYTES_AT_ONCE = 64 * 1024
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
        step: The step that errors name.
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
        step: int,
        what: str,
    ) -> None:
        self._link, self._step, self._what = link, step, what
        try:
            self._work = start()
        except RuntimeError as error:
            raise link.broken(error, step, what) from error
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
                how = f"the {self._what} had no end in {link.timeout_s:g} s"
                raise link.failure("silent", self._step, how)
            # What others sent before they gave this worker up has waited for it in its sockets.
            if watch is not None and watch.is_given_up(link.timeout_s):
                how = f"this worker came too late to the {self._what}"
                raise link.failure("silent", self._step, how)
        finally:
            if watch is not None:
                watch.in_exchange = False

    def _has_ended(self) -> bool:
        """Wait for the end; False where it has none in time, or a peer failed."""
        work, link = self._work, self._link
        if link.watch is not None:  # others may ask whether this worker has come to the exchange
            link.watch.enter_exchange()
        if work is None:
            return True
        if link.wire_device.type != "cpu":  # NCCL gives a communicator up when a wait is over
            work.wait(timedelta(seconds=link.timeout_s))
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

    Args:
        process_group: The workers; this process is one of them.
        device: Where the parameters live.
        timeout_s: How long one collective may take.
        ranks: The rank of each member among all workers that vote, which errors name; None for its
            rank in the group.
        watch: What finds out which of all these workers failed; None to go without.
        wire_device: Where the tensors on the wire live; None for the parameters' device.

    Attributes:
        kernels: The arithmetic on the wire's device.
        rank: This process among the members.
        world_size: Number of members.
        counted: What was handed to the network since ``take_counted``.

    Raises:
        ProcessGroupError: The group cannot carry tensors of the wire's device.
        KernelBackendError: There are no kernels for it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        watch: PeerWatch | None = None,
        wire_device: torch.device | None = None,
    ) -> None:
        self.process_group = process_group
        self.device = device
        self.wire_device = device if wire_device is None else wire_device
        self.kernels = choose_kernels(self.wire_device)
        self.timeout_s = timeout_s
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.ranks = tuple(range(self.world_size) if ranks is None else ranks)
        self.watch = watch
        self.counted = ByteCount()
        self._first = dist.get_global_rank(process_group, 0)
        self._check_backend()

    def _check_backend(self) -> None:
        """Gloo carries CPU tensors, NCCL CUDA tensors."""
        backend = dist.get_backend_config(self.process_group)
        backends = dict(part.split(":") for part in str(backend).split(",") if ":" in part)
        name = backends.get(self.wire_device.type, "")
        if not name or (name == "gloo" and self.wire_device.type != "cpu"):
            raise ProcessGroupError(
                f"the process group ({backend}) cannot carry {self.wire_device.type} tensors; "
                "expected Gloo for CPU parameters, NCCL for CUDA parameters: pass "
                "backend='cpu:gloo,cuda:nccl' to init_process_group"
            )

    def empty(self, *shape: int) -> Tensor:
        """Allocate uninitialized uint8 on the wire's device."""
        return torch.empty(shape, dtype=torch.uint8, device=self.wire_device)

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int) -> Transfer:
        """Send chunk i to member i; ``out`` and ``chunks`` are (world_size, n) uint8."""
        peers = self.world_size - 1
        n_bytes = peers * chunks[0].nbytes
        start = partial(
            dist.all_to_all_single, out, chunks, group=self.process_group, async_op=True
        )
        sent = ByteCount(n_bytes, n_bytes, peers)
        return Transfer(self, start, sent, step=step, what="all-to-all")

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int) -> Transfer:
        """Send ``chunk`` (n,) to every member; ``out`` is (world_size, n), of the same dtype."""
        if self.gathers_at_once(chunk.nbytes):
            chunks = chunk.expand(self.world_size, -1).contiguous()
            return self.all_to_all(out, chunks, step=step)
        peers = self.world_size - 1
        start = partial(_all_gather, out.view(-1), chunk, group=self.process_group, async_op=True)
        sent = ByteCount(peers * chunk.nbytes, peers * chunk.nbytes, peers)
        return Transfer(self, start, sent, step=step, what="all-gather")

    def gathers_at_once(self, chunk_bytes: int) -> bool:
        """Return whether an all-gather sends to all members at once, not along a ring.

        Gloo's ring takes world_size - 1 rounds, one after the other, which is slow for chunks that
        cost little more than a round; large ones collide on their way to one receiver.
        """
        return self.wire_device.type == "cpu" and chunk_bytes <= MOST_BYTES_AT_ONCE

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int) -> Transfer:
        """Send ``chunk`` (n,) to the first member; only that one gives ``out``, (world_size, n)."""
        rows = None if out is None else list(out)
        start = partial(
            dist.gather, chunk, rows, dst=self._first, group=self.process_group, async_op=True
        )
        sent = ByteCount(chunk.nbytes, 0, 1)
        if out is not None:
            sent = ByteCount(0, (self.world_size - 1) * chunk.nbytes, 0)
        return Transfer(self, start, sent, step=step, what="gather")

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int) -> Transfer:
        """Receive ``out`` (n,) from the first member; only that one gives (world_size, n)."""
        rows = None if chunks is None else list(chunks)
        start = partial(
            dist.scatter, out, rows, src=self._first, group=self.process_group, async_op=True
        )
        sent = ByteCount(0, out.nbytes, 0)
        if chunks is not None:
            peers = self.world_size - 1
            sent = ByteCount(peers * out.nbytes, 0, peers)
        return Transfer(self, start, sent, step=step, what="scatter")

    def broadcast(self, tensor: Tensor, *, step: int, source: int = 0) -> Transfer:
        """Overwrite ``tensor`` with that of a rank of the link; not counted."""
        sender = dist.get_global_rank(self.process_group, source)
        start = partial(dist.broadcast, tensor, sender, group=self.process_group, async_op=True)
        return Transfer(self, start, ByteCount(), step=step, what="broadcast")

    def take_counted(self) -> ByteCount:
        """Return what was handed to the network since the last call, and start again from 0."""
        counted, self.counted = self.counted, ByteCount()
        return counted

    def broken(self, error: RuntimeError, step: int, what: str) -> PeerLostError | StepTimeoutError:
        """Turn what the transport raised into an error that says who failed."""
        reason = str(error).split("\n")[0]
        kind: FailureKind = "silent" if "timed out" in reason.lower() else "lost"
        return self.failure(kind, step, f"the {what} failed ({reason})")

    def failure(self, kind: FailureKind, step: int, what: str) -> PeerLostError | StepTimeoutError:
        """Find out who failed, for an error; the group is of no use from here on."""
        keep_forever(self.process_group)
        found = Finding(kind) if self.watch is None else self.watch.settle(kind)
        error = StepTimeoutError if found.kind == "silent" else PeerLostError
        return error(
            f"{what}: {_explain(found, self.ranks[self.rank])}; nothing was committed here",
            rank=self.ranks[self.rank],
            step=step,
            culprits=found.culprits,
        )


_LIMITS = "step_timeout_s= sets the limit, init_timeout_s= that of construction"


def _explain(found: Finding, own: int) -> str:
    names = ", ".join(f"rank {rank}" for rank in found.culprits) or "a peer"
    if own in found.culprits:
        return "the other workers heard nothing of this one for too long, and gave it up"
    if found.busy:
        text = (
            f"{names} runs, but did not come to the exchange; is it slower than the limit, or has "
            f"it left the training loop? {_LIMITS}"
        )
    elif found.kind == "silent":
        text = (
            f"{names} does not answer; is the process stopped, its machine or network down, or "
            f"did it make no optimizer? {_LIMITS}"
        )
    else:
        text = f"{names} is gone; look at its log"
    return f"{text} ({found.note})" if found.note else text

"""Transport over a process group of Gloo: a deadline, a byte counter, errors that name the step."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import ProcessGroupError, StepError
from distlion.failures import FailureKind
from distlion.kernels.dispatch import choose_kernels
from distlion.wire.finding import Finding, describe_loss
from distlion.wire.groups import (
    HOST,
    carries_host_memory,
    keep,
    list_pairs,
    outlive_interpreter,
    pair_group,
    take_kept,
    tidy,
)
from distlion.wire.roll_call import Patience
from distlion.wire.sharing import SharedTransfer
from distlion.wire.sockets import SocketWork
from distlion.wire.transport import MOST_BYTES_AT_ONCE, ByteCount, Transfer
from distlion.wire.watch import READ_S, PeerWatch, within

logger = logging.getLogger("distlion")

_under_way: set[GlooTransfer] = set()
"""Transfers under way: destroying their group would wait for them, perhaps forever."""
outlive_interpreter(_under_way)

# Seconds between a wait's looks for another worker's alarm.
LOOK_S = 0.1
# 2 hosts, 1 MB: a step took 198 ms instead of 235 at 100 Mbit/s, 115 instead of 120 at 1 Gbit/s.
LEAST_BYTES_TO_MEET = 256 * 1024


LIMITS = (
    "Timeouts.step_s limits the silence of a worker, Timeouts.busy_s the wait for one that runs, "
    "Timeouts.init_s construction"
)


class GlooTransfer:
    """A collective under way; its output has no meaning before ``wait`` returns.

    Args:
        link: The transport that it runs on.
        start: Function that starts it.
        sent: The bytes that it sends.
        step: The step that errors name; None for none.
        what: Its name in errors.
        is_common: Whether all members of the link begin it.

    Raises:
        PeerLostError: A peer's connection closed.
        StepTimeoutError: A peer did not answer in time.
    """

    is_held = False

    def __init__(
        self,
        link: Gloo,
        start: Callable[[], dist.Work | SocketWork | None],
        sent: ByteCount,
        *,
        step: int | None,
        what: str,
        is_common: bool = True,
    ) -> None:
        self._link, self._step, self._what = link, step, what
        self._is_common = is_common
        self._work: dist.Work | SocketWork | None = None
        self._is_starting = True
        _under_way.add(self)
        try:
            self._work = start()
        except RuntimeError as error:
            raise link.broken(error, step, what) from None
        finally:
            self._is_starting = False
        self._start_s = time.monotonic()
        link.n_under_way += is_common
        # One call fewer than a sum of two counts, as every step does it.
        before = link.counted
        link.counted = ByteCount(
            before.sent_bytes + sent.sent_bytes,
            before.received_bytes + sent.received_bytes,
            before.messages + sent.messages,
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Process group that carries it."""
        return self._link.process_group

    def begin(self) -> None:
        """Do nothing, as it has begun."""

    @property
    def is_completed(self) -> bool:
        """True if nothing of it is under way, whether or not it has succeeded."""
        # Other threads ask, also while it starts.
        return not self._is_starting and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            PeerLostError: A peer's connection closed.
            StepTimeoutError: It did not complete in time.
        """
        link, watch = self._link, self._link.watch
        try:
            try:
                has_ended = self._has_ended()
            except RuntimeError as error:
                # Gloo's own lines would bury the error, and name no rank.
                raise link.broken(error, self._step, self._what) from None
            if not has_ended:
                passed_s = time.monotonic() - self._start_s
                how = f"the {self._what} did not complete within {passed_s:.1f} s"
                raise link.failure("silent", self._step, how)
            if self in _under_way:
                _under_way.discard(self)
                link.n_under_way -= self._is_common
            # Bytes that others sent before they gave this worker up may wait in its sockets.
            if watch is not None and watch.is_given_up(link.timeout_s, link.among):
                how = f"this worker came too late to the {self._what}"
                raise link.failure("silent", self._step, how)
        finally:
            if watch is not None:
                watch.leave_exchange(self)

    def _has_ended(self) -> bool:
        """Wait for the end; return False if it does not come in time, or a peer failed."""
        work, link, patience = self._work, self._link, None
        if link.watch is not None:  # others may ask whether this worker has come to the exchange
            link.watch.enter_exchange(self)
        if work is None:
            return True
        deadline_s = time.monotonic() + link.timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                # Below a millisecond would become 0, which means forever.
                work.wait(timedelta(seconds=max(0.001, min(left_s, LOOK_S))))
            except RuntimeError:
                if not work.is_completed():
                    if link.watch is not None and link.watch.has_failed(link.among):
                        return False
                    patience = patience or link.be_patient(deadline_s)
                    if patience is not None and link.watch is not None:
                        deadline_s = patience.find_deadline(link.watch.optimizer)
                    continue
                work.wait()  # raises the error, unless it has just completed
            return True
        return False


class Gloo:
    """A ``Transport`` over one process group, which carries host memory.

    Args:
        process_group: The members.
        timeout_s: Seconds that one collective may take.
        busy_timeout_s: Seconds that it waits for workers that run, and have not come to it yet;
            None for no longer than ``timeout_s``. Needs a watch.
        ranks: The rank of each member among all workers that vote, which errors name; None for its
            rank in the group.
        watch: The watch that finds the workers that failed; None for no watch.
        limits: The arguments that set its limit, for errors.
        shares: Whether small all-to-alls wait for each other, to travel as one; see ``Transfer``.
        are_one: Whether the members act as one worker of a crew, so that a transfer ends although
            others have failed; see ``PeerWatch.has_failed``.

    Attributes:
        process_group: The members; this process is one of them.
        timeout_s, busy_timeout_s: The arguments.
        among: The members' ranks if they act as one; else None.
        n_under_way: Number of collectives of all members that have begun and were not waited for.
            It is the same on all of them, where they begin the next one.

    Raises:
        ProcessGroupError: The group cannot carry them.
        KernelBackendError: There are no kernels for the host.
    """

    ring_above_bytes: int | None = MOST_BYTES_AT_ONCE

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        timeout_s: float,
        busy_timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
        watch: PeerWatch | None = None,
        limits: str = LIMITS,
        shares: bool = False,
        are_one: bool = False,
    ) -> None:
        self.process_group = process_group
        self.wire_device = HOST
        self.kernels = choose_kernels(self.wire_device)
        self.timeout_s, self.busy_timeout_s = timeout_s, busy_timeout_s
        self.rank = process_group.rank()
        self.n_members = process_group.size()
        self.ranks = tuple(range(self.n_members) if ranks is None else ranks)
        self.among = self.ranks if are_one else None
        self.watch, self._limits = watch, limits
        self.counted = ByteCount()
        self.n_under_way = 0
        self._shares = shares
        self._shared: SharedTransfer | None = None
        if not carries_host_memory(process_group):
            raise ProcessGroupError(
                f"the process group ({dist.get_backend_config(process_group)}) cannot carry host "
                "memory; pass backend='cpu:gloo,cuda:nccl' to init_process_group"
            )

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.wire_device)

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int | None) -> Transfer:
        is_small = chunks.nbytes <= self.n_members * MOST_BYTES_AT_ONCE
        if not (self._shares and is_small and chunks.dtype == torch.uint8):
            return self._send_to_all(out, chunks, step=step)
        shared = self._shared
        if shared is None or not shared.is_held:
            self._shared = shared = SharedTransfer(partial(self._send_to_all, step=step))
        shared.add(out, chunks)
        return shared

    def _send_to_all(
        self, out: Tensor, chunks: Tensor, *, step: int | None, n_parts: int = 1
    ) -> GlooTransfer:
        n_bytes = chunks.nbytes // self.n_members
        if n_bytes >= LEAST_BYTES_TO_MEET and not self.n_under_way:
            self._meet(step=step)
        peers = self.n_members - 1
        start = partial(self.process_group.alltoall_base, out, chunks, [], [])
        sent = ByteCount(peers * n_bytes, peers * n_bytes, n_parts * peers)
        return GlooTransfer(self, start, sent, step=step, what="all-to-all")

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int | None) -> Transfer:
        # A ring is slow for chunks that cost little more than a round; large ones that went to all
        # at once would collide on the way to one receiver.
        if chunk.nbytes <= MOST_BYTES_AT_ONCE:
            chunks = chunk.expand(self.n_members, -1).contiguous()
            return self.all_to_all(out, chunks, step=step)
        if chunk.nbytes >= LEAST_BYTES_TO_MEET and not self.n_under_way:
            self._meet(step=step)
        peers = self.n_members - 1
        start = partial(self.process_group._allgather_base, out.view(-1), chunk)
        sent = ByteCount(peers * chunk.nbytes, peers * chunk.nbytes, peers)
        return GlooTransfer(self, start, sent, step=step, what="all-gather")

    def _meet(self, *, step: int | None) -> None:
        """Wait for all members before a large transfer, if nothing else is under way.

        Gloo lets a worker send before it announces that it is ready to receive. Of two workers, the
        later one would find the other ready. Its own announcement would then queue behind all of
        its bytes, and the other's bytes would have to wait. So each member first sends a byte to
        the others; like Gloo's own messages it is not counted.
        """
        heard, said = (
            torch.zeros(self.n_members, 1, dtype=torch.uint8, device="cpu") for _ in range(2)
        )
        start = partial(self.process_group.alltoall_base, heard, said, [], [])
        GlooTransfer(self, start, ByteCount(), step=step, what="all-to-all").wait()

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int | None) -> GlooTransfer:
        rows = [] if out is None else [list(out)]
        start = partial(self.process_group.gather, rows, [chunk], _from(0, dist.GatherOptions()))
        sent = ByteCount(chunk.nbytes, 0, 1)
        if out is not None:
            sent = ByteCount(0, (self.n_members - 1) * chunk.nbytes, 0)
        return GlooTransfer(self, start, sent, step=step, what="gather")

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int | None) -> GlooTransfer:
        rows = [] if chunks is None else [list(chunks)]
        start = partial(self.process_group.scatter, [out], rows, _from(0, dist.ScatterOptions()))
        sent = ByteCount(0, out.nbytes, 0)
        if chunks is not None:
            peers = self.n_members - 1
            sent = ByteCount(peers * out.nbytes, 0, peers)
        return GlooTransfer(self, start, sent, step=step, what="scatter")

    def connect(self, peer: int, *, timeout_s: float | None = None) -> None:
        self._pair(peer, self.timeout_s if timeout_s is None else timeout_s)

    def _pair(self, peer: int, timeout_s: float) -> dist.ProcessGroup:
        with nullcontext() if self.watch is None else self.watch.connecting():
            return pair_group(self.process_group, peer, timeout_s=timeout_s)

    def swap(self, out: Tensor, chunk: Tensor, *, peer: int, step: int | None) -> GlooTransfer:
        # A group of the two: Gloo's all-to-all of all would send every member an empty message, and
        # a wait for what it sends to one member alone cannot be left without breaking all others.
        group = self._pair(peer, self.timeout_s)
        sizes = [[0, 0], [0, 0]]
        for row, tensor in zip(sizes, (out, chunk), strict=True):
            row[int(peer > self.rank)] = tensor.numel()
        start = partial(group.alltoall_base, out, chunk, *sizes)
        sent = ByteCount(chunk.nbytes, out.nbytes, int(chunk.nbytes > 0))
        what = f"swap with rank {self.ranks[peer]}"
        # Some members may have no peer.
        return GlooTransfer(self, start, sent, step=step, what=what, is_common=False)

    def broadcast(self, tensor: Tensor, *, step: int | None, source: int = 0) -> GlooTransfer:
        options = _from(source, dist.BroadcastOptions())
        start = partial(self.process_group.broadcast, [tensor], options)
        return GlooTransfer(self, start, ByteCount(), step=step, what="broadcast")

    def broken(self, error: RuntimeError, step: int | None, what: str) -> StepError:
        """Turn the transport's error into one that names the ranks that failed."""
        reason = tidy(error)
        logger.debug("the %s failed: %s", what, reason)
        kind: FailureKind = "silent" if "timed out" in reason.lower() else "lost"
        return self.failure(kind, step, f"the {what} failed")

    def be_patient(self, deadline_s: float) -> Patience | None:
        """Return the patience with workers that run; None for none.

        Args:
            deadline_s: The end of its wait, unless others turn out to be busy.
        """
        watch, busy_limit_s = self.watch, self.busy_timeout_s
        if watch is None or busy_limit_s is None or busy_limit_s <= self.timeout_s:
            return None
        return Patience(
            watch.call_roll,
            start_s=deadline_s - self.timeout_s,
            limit_s=self.timeout_s,
            busy_limit_s=busy_limit_s,
            rank=watch.rank,
            call=str(watch.turns.now),
        )

    def check_present(self, *, step: int | None) -> None:
        left = None
        if self.watch is not None:
            with suppress(RuntimeError):  # a store that is gone, or silent, gives no answer
                left = within(READ_S, self.watch.read_left)
        if left is not None:
            raise self.failure("left", step, "workers cannot connect")

    def failure(self, kind: FailureKind, step: int | None, what: str) -> StepError:
        for group in (self.process_group, *list_pairs(self.process_group)):
            keep(group)
        found = Finding(kind) if self.watch is None else self.watch.agree_on_failure(kind)
        rank, limits = self.ranks[self.rank], self._limits
        return describe_loss(found, rank=rank, step=step, what=what, limits=limits)


def let_go_of_failed(*, since_s: float, settled_since_s: float) -> None:
    """End failed groups on which nothing is under way, and close their connections.

    Args:
        since_s: Seconds since the failure, more than any operation on a group may take.
        settled_since_s: The same for groups on which all of distlion's transfers have completed,
            as after a closed connection: more than a user's own operations may take.
    """
    pending = [each.process_group for each in _under_way.copy() if not each.is_completed]
    groups = take_kept(since_s=since_s)
    groups += take_kept(since_s=min(since_s, settled_since_s), unless=pending)
    _under_way.difference_update(
        [each for each in _under_way.copy() if each.process_group in groups]
    )
    if groups:
        del groups
        gc.collect()  # raised errors hold references to their transfers, and to themselves


def _from(root: int, options: Any) -> Any:
    """Set a member of the group as the root in a collective's options."""
    options.rootRank = root
    return options

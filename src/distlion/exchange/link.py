"""A process group with a deadline, a byte counter and errors that name the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.errors import PeerLostError, ProcessGroupError, StepTimeoutError

# all_gather_into_tensor became all_gather_single in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Plan:
    """Bytes and messages of one rank; what it sends to itself is not in it.

    Attributes:
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        messages: Messages sent.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    def __add__(self, other: Plan) -> Plan:
        return Plan(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.messages + other.messages,
        )


class Link:
    """The collectives that patterns use, over one process group.

    Args:
        process_group: The workers that vote; this process is one of them.
        device: Where the tensors on the wire live.
        timeout_s: How long one collective may take.

    Raises:
        ProcessGroupError: The group cannot carry tensors of this device.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, *, timeout_s: float
    ) -> None:
        self.process_group = process_group
        self.device = device
        self.timeout_s = timeout_s
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.counted = Plan()
        self._check_backend()

    def _check_backend(self) -> None:
        """Gloo carries CPU tensors, NCCL CUDA tensors."""
        backend = dist.get_backend_config(self.process_group)
        backends = dict(part.split(":") for part in str(backend).split(",") if ":" in part)
        name = backends.get(self.device.type, "")
        if not name or (name == "gloo" and self.device.type != "cpu"):
            raise ProcessGroupError(
                f"the process group ({backend}) cannot carry {self.device.type} tensors; expected "
                "Gloo for CPU parameters, NCCL for CUDA parameters: pass "
                "backend='cpu:gloo,cuda:nccl' to init_process_group"
            )

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int) -> None:
        """Send chunk i to rank i; ``out`` and ``chunks`` are (world_size, n) uint8."""
        self._wait(
            lambda: dist.all_to_all_single(out, chunks, group=self.process_group, async_op=True),
            step,
            "all-to-all",
        )
        self._count(chunks[0].nbytes)

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int) -> None:
        """Send ``chunk`` (n,) to every rank; ``out`` is (world_size, n), of the same dtype."""
        self._wait(
            lambda: _all_gather(out.view(-1), chunk, group=self.process_group, async_op=True),
            step,
            "all-gather",
        )
        self._count(chunk.nbytes)

    def broadcast(self, tensor: Tensor, *, step: int) -> None:
        """Overwrite ``tensor`` with that of the group's first rank; not counted."""
        source = dist.get_global_rank(self.process_group, 0)
        self._wait(
            lambda: dist.broadcast(tensor, source, group=self.process_group, async_op=True),
            step,
            "broadcast",
        )

    def take_counted(self) -> Plan:
        """Return what was handed to the network since the last call, and start again from 0."""
        counted, self.counted = self.counted, Plan()
        return counted

    def _count(self, chunk_bytes: int) -> None:
        peers = self.world_size - 1
        self.counted += Plan(peers * chunk_bytes, peers * chunk_bytes, peers)

    def _wait(self, start: Callable[[], dist.Work | None], step: int, what: str) -> None:
        try:
            work = start()
            if work is not None:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            if "timed out" in reason.lower() or "timeout" in reason.lower():
                raise StepTimeoutError(
                    f"a peer did not answer in the {what} within {self.timeout_s:g} s ({reason}); "
                    "is a worker stopped, slower than that, or has it left the training loop? "
                    "step_timeout_s= sets the limit, init_timeout_s= that of construction",
                    rank=self.rank,
                    step=step,
                ) from error
            raise PeerLostError(
                f"the {what} failed, most likely because a peer is gone ({reason}); look at the "
                "other workers' logs",
                rank=self.rank,
                step=step,
            ) from error

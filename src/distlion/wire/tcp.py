"""Transport over sockets of distlion's own: what differs from Gloo's, and the choice of one."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor

from distlion.errors import InvalidArgumentError, StepError
from distlion.failures import FailureKind
from distlion.wire.addresses import list_chosen, read_ports
from distlion.wire.gloo import Gloo, GlooTransfer
from distlion.wire.sockets import SocketGroup, load_endpoint
from distlion.wire.transport import ByteCount

WIRE_VARIABLE = "DISTLION_WIRE"
Wire = Literal["gloo", "tcp"]


class Tcp(Gloo):
    """A ``Transport`` over a ``SocketGroup``; arguments as for ``Gloo``.

    No worker waits for another one before it sends, chunks go straight to their receivers whatever
    their size, and two members swap over the connection that they have. After a failure all
    connections are closed.
    """

    ring_above_bytes = None

    def _meet(self, *, step: int | None) -> None:
        """Do nothing: a receiver announces nothing that could queue behind a sender's bytes."""

    def connect(self, peer: int, *, timeout_s: float | None = None) -> None:
        """Do nothing, as all members are connected."""

    def swap(self, out: Tensor, chunk: Tensor, *, peer: int, step: int | None) -> GlooTransfer:
        start = partial(self._sockets.swap, out, chunk, peer)
        sent = ByteCount(chunk.nbytes, out.nbytes, int(chunk.nbytes > 0))
        what = f"swap with rank {self.ranks[peer]}"
        return GlooTransfer(self, start, sent, step=step, what=what)

    def failure(self, kind: FailureKind, step: int | None, what: str) -> StepError:
        try:
            return super().failure(kind, step, what)
        finally:
            self._sockets.cancel()

    @property
    def _sockets(self) -> SocketGroup:
        return cast(SocketGroup, self.process_group)


def choose_wire(*, alone: bool = False) -> Wire:
    """Return the transport that ``DISTLION_WIRE`` names.

    Without it, own sockets on Linux, and Gloo elsewhere.

    Args:
        alone: Whether nothing will be sent, so that sockets need not be there.

    Raises:
        InvalidArgumentError: It names another one, or one that this system lacks; or the port or
            the interface for it is none.
        KernelBackendError: Own sockets were not built.
    """
    chosen = os.environ.get(WIRE_VARIABLE) or ("tcp" if sys.platform == "linux" else "gloo")
    if chosen not in ("gloo", "tcp"):
        raise InvalidArgumentError(f"{WIRE_VARIABLE}={chosen}: expected gloo or tcp")
    if chosen == "tcp" and sys.platform != "linux":
        raise InvalidArgumentError(
            f"{WIRE_VARIABLE}=tcp on {sys.platform}: own sockets need Linux; set "
            f"{WIRE_VARIABLE}=gloo on every worker"
        )
    if chosen == "tcp" and not alone:
        # An error that comes later keeps the others waiting for this worker.
        load_endpoint()
        read_ports()
        list_chosen()
    return cast(Wire, chosen)


def link_over(process_group: dist.ProcessGroup, **options: Any) -> Gloo:
    """Return a transport over a group, by its kind; options as for ``Gloo``."""
    members: object = process_group
    return (Tcp if isinstance(members, SocketGroup) else Gloo)(process_group, **options)

"""Groups over sockets of distlion's own, with the methods of a process group that links use."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distlion.errors import KernelBackendError
from distlion.wire.rendezvous import meet

if TYPE_CHECKING:
    from distlion.wire._endpoint import Endpoint

MOST_EARLY_BYTES = 64 << 20
"""Memory of a group for chunks that come before this worker wants them; more of them wait at their
senders."""
_COLLECTIVES, _SWAPS = 0, 1
_SLICE_S = 0.5
_Piece = tuple[int, int, int]


def load_endpoint() -> type[Endpoint]:
    """Load what moves the bytes; it is a part of the C++ core, and made for Linux alone.

    Raises:
        KernelBackendError: It was not built.
    """
    try:
        module = import_module("distlion.wire._endpoint")
    except ImportError as error:
        raise KernelBackendError(
            f"distlion's own sockets cannot be imported ({error}); build them with 'pip install .' "
            "(or 'make train') in a checkout, which needs a C++20 compiler, or set "
            "DISTLION_WIRE=gloo on every worker to send votes over Gloo"
        ) from error
    made: type[Endpoint] = module.Endpoint
    return made


class SocketWork:
    """A collective under way, as torch's ``Work``.

    Args:
        group: The group that carries it.
        serial: Its place among what the group holds.
        number: Its number at the group's endpoint.
    """

    def __init__(self, group: SocketGroup, serial: int, number: int) -> None:
        self._group, self._serial, self._number = group, serial, number

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return not self._group._endpoint.is_under_way(self._number)

    def wait(self, limit: timedelta | None = None) -> bool:
        """Wait for its end.

        Raises:
            RuntimeError: It failed, or did not end within the limit.
        """
        while not self._group._endpoint.wait(
            self._number, _SLICE_S if limit is None else limit.total_seconds()
        ):
            if limit is not None:
                raise RuntimeError("timed out")
        self._group._held.pop(self._serial, None)
        return True


class SocketGroup:
    """The connections of some workers, one to each peer, over which all of them begin collectives.

    Args:
        store: A store of the group alone.
        rank: This worker.
        size: Number of workers.
        timeout_s: Seconds for all to connect.
        names: Ranks that errors name, by rank in the group; None: those in the group.

    Raises:
        MeetingError: Some worker did not connect.
        InvalidArgumentError: An environment variable is no port, or names no interface.
        KernelBackendError: The endpoint was not built.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        names: Sequence[int] | None = None,
    ) -> None:
        make = load_endpoint()
        sockets = meet(store, rank, size, timeout_s=timeout_s, names=names)
        descriptors = [-1 if each is None else each.detach() for each in sockets]
        self._rank, self._size = rank, size
        try:
            self._endpoint: Endpoint = make(rank, descriptors, MOST_EARLY_BYTES)
        except BaseException:
            for descriptor in descriptors:
                if descriptor >= 0:
                    os.close(descriptor)
            raise
        # Tensors that the endpoint reads and writes, by collective.
        self._held: dict[int, tuple[Tensor, ...]] = {}
        self._serials = itertools.count()
        # The next rank first, so that not all begin with the same one.
        self._order = [(rank + place) % size for place in range(size)]
        _groups.add(self)

    def rank(self) -> int:
        """Return the rank of this worker."""
        return self._rank

    def size(self) -> int:
        """Return the number of workers."""
        return self._size

    def alltoall_base(
        self, out: Tensor, chunks: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> SocketWork:
        """Send each worker a chunk; sizes count elements, none: all chunks have the same."""
        sends, receives = self._cut(chunks, sizes), self._cut(out, out_sizes)
        return self._begin(sends, receives, out, chunks)

    def _allgather_base(self, out: Tensor, chunk: Tensor) -> SocketWork:
        sends = [(peer, chunk.data_ptr(), chunk.nbytes) for peer in self._order]
        return self._begin(sends, self._cut(out, ()), out, chunk)

    def gather(
        self, rows: Sequence[Sequence[Tensor]], chunks: Sequence[Tensor], options: Any
    ) -> SocketWork:
        """Send a chunk to the root, which gives a row for each worker."""
        sends = [_piece(options.rootRank, chunks[0])]
        receives = [_piece(peer, row) for peer, row in enumerate(rows[0])] if rows else []
        return self._begin(sends, receives, *chunks, *(rows[0] if rows else ()))

    def scatter(
        self, outs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]], options: Any
    ) -> SocketWork:
        """Receive a chunk from the root, which gives a row for each worker."""
        sends = [_piece(peer, row) for peer, row in enumerate(rows[0])] if rows else []
        receives = [_piece(options.rootRank, outs[0])]
        return self._begin(sends, receives, *outs, *(rows[0] if rows else ()))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> SocketWork:
        """Send the root's tensor to all others."""
        (tensor,), root = tensors, options.rootRank
        others = [_piece(peer, tensor) for peer in self._order if peer != self._rank]
        if self._rank == root:
            return self._begin(others, [], tensor)
        return self._begin([], [_piece(root, tensor)], tensor)

    def swap(self, out: Tensor, chunk: Tensor, peer: int) -> SocketWork:
        """Send a chunk to one worker, and receive one from it; in an order of their own."""
        return self._begin([_piece(peer, chunk)], [_piece(peer, out)], out, chunk, stream=_SWAPS)

    def cancel(self) -> None:
        """Close all connections; transfers that are under way fail."""
        self._endpoint.cancel()
        self._held.clear()

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[_Piece]:
        address = tensor.data_ptr()
        if not sizes:
            n_bytes = tensor.nbytes // self._size
            return [(peer, address + peer * n_bytes, n_bytes) for peer in self._order]
        pieces, item_bytes = [], tensor.element_size()
        for peer, n_items in enumerate(sizes):
            pieces.append((peer, address, n_items * item_bytes))
            address += n_items * item_bytes
        return pieces

    def _begin(
        self,
        sends: Sequence[_Piece],
        receives: Sequence[_Piece],
        *tensors: Tensor,
        stream: int = _COLLECTIVES,
    ) -> SocketWork:
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise RuntimeError("expected contiguous tensors in host memory")
        serial = next(self._serials)
        self._held[serial] = tensors  # an interrupt may come as soon as it has begun
        return SocketWork(self, serial, self._endpoint.begin(stream, sends, receives))


def _piece(peer: int, tensor: Tensor) -> _Piece:
    return peer, tensor.data_ptr(), tensor.nbytes


_groups: weakref.WeakSet[SocketGroup] = weakref.WeakSet()


def _abandon_all() -> None:
    """Close a fork's copies of connections, which would keep them open after this process."""
    for group in list(_groups):
        group._endpoint.abandon()
    _groups.clear()


os.register_at_fork(after_in_child=_abandon_all)

"""Small all-to-alls of one link that travel together, as a message costs more than its bytes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distlion.wire.transport import Transfer

# A message between two processes of one machine takes 0.16 ms of a processor, however small.
MOST_BYTES_TO_SHARE = 256 * 1024
"""Bytes for one member from which on a message is sent without waiting for more."""


class StartAllToAll(Protocol):
    """Start an all-to-all of (n_members, n) uint8 ``chunks``, which were ``n_parts`` before."""

    def __call__(self, out: Tensor, chunks: Tensor, *, n_parts: int) -> Transfer: ...


class SharedTransfer:
    """All-to-alls that begin together, when one of them is waited for; a ``Transfer`` of each.

    Every member adds the same ones, in the same order, before it waits for one of them.

    Args:
        start: Function that starts one all-to-all for all of them.

    Attributes:
        is_held: Whether it has not begun.
        n_bytes: Bytes for one member so far.
    """

    def __init__(self, start: StartAllToAll) -> None:
        self._start = start
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._out = torch.zeros(0, dtype=torch.uint8, device="cpu")
        self._transfer: Transfer | None = None
        self.is_held, self._has_ended, self.n_bytes = True, False, 0

    def add(self, out: Tensor, chunks: Tensor) -> None:
        """Add an all-to-all, before it begins; ``out`` and ``chunks`` are (n_members, n) uint8."""
        self._parts.append((out, chunks))
        self.n_bytes += chunks.shape[1]
        if self.n_bytes >= MOST_BYTES_TO_SHARE:
            self.begin()

    def begin(self) -> None:
        """Send all of them; once is enough."""
        if not self.is_held:
            return
        self.is_held = False
        (self._out, chunks), *more = self._parts
        if more:
            chunks = torch.cat([chunks for _, chunks in self._parts], dim=1)
            self._out = torch.empty_like(chunks)
        self._transfer = self._start(self._out, chunks, n_parts=len(self._parts))

    def wait(self) -> None:
        """Wait for the end of all of them, and fill the output of each."""
        if self._has_ended:
            return
        self.begin()
        assert self._transfer is not None
        self._transfer.wait()
        self._has_ended = True
        if len(self._parts) > 1:
            at = 0
            for out, _ in self._parts:
                out.copy_(self._out[:, at : at + out.shape[1]])
                at += out.shape[1]
        self._parts = []

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
    """

    def __init__(self, start: StartAllToAll) -> None:
        self._start = start
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._out = torch.zeros(0, dtype=torch.uint8, device="cpu")
        self._transfer: Transfer | None = None
        self._has_ended = False

    @property
    def is_held(self) -> bool:
        """True before it begins."""
        return self._transfer is None

    @property
    def is_full(self) -> bool:
        """True if enough bytes wait for one member."""
        return sum(chunks[0].nbytes for _, chunks in self._parts) >= MOST_BYTES_TO_SHARE

    def add(self, out: Tensor, chunks: Tensor) -> None:
        """Add an all-to-all, before it begins; ``out`` and ``chunks`` are (n_members, n) uint8."""
        self._parts.append((out, chunks))

    def begin(self) -> None:
        """Send all of them; once is enough."""
        if self._transfer is not None:
            return
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

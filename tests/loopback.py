"""A network inside one process: several ranks' exchanges, round by round, without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from distlion.kernels import Kernels, choose_kernels
from distlion.wire.pattern import Exchanging
from memory_link import Memory, MemoryTransfer, connect_in_memory

T = TypeVar("T")
CPU = torch.device("cpu")


class CountingKernels:
    """The kernels, and how many rows they have checked or signed with a checksum."""

    def __init__(self) -> None:
        self.kernels = choose_kernels(CPU)
        self.n_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def write_frames(self, out: Tensor, *rest: Any, **more: Any) -> None:
        self.n_rows += len(out)
        self.kernels.write_frames(out, *rest, **more)

    def read_frames(self, rows: Tensor, *rest: Any) -> tuple[bool, Tensor, Tensor]:
        self.n_rows += len(rows)
        return self.kernels.read_frames(rows, *rest)


def make_links(n: int) -> list[Memory]:
    """Make the ends of a network; their kernels count."""
    links = connect_in_memory(n)
    for link in links:
        link.kernels = cast(Kernels, CountingKernels())
    return links


_TRANSFERS = ("all_to_all", "all_gather", "gather", "scatter", "swap")


class Crossed:
    """A link on which the transfers of two exchanges get each other's bytes in one round.

    Args:
        link: The link. Both exchanges begin a transfer on it in each round.
        mixed: Number of that round.
    """

    def __init__(self, link: Memory, mixed: int) -> None:
        self._link, self._mixed = link, mixed
        self._begun: list[tuple[MemoryTransfer, Tensor | None]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._link, name)
        return partial(self._begin, found) if name in _TRANSFERS else found

    def _begin(
        self, begin: Callable[..., MemoryTransfer], out: Tensor | None, *args: Any, **more: Any
    ) -> MemoryTransfer:
        spare = None if out is None else torch.empty_like(out)
        self._begun.append((begin(spare, *args, **more), spare))
        return MemoryTransfer(partial(self._take, len(self._begun) - 1, out))

    def _take(self, number: int, out: Tensor | None) -> None:
        transfer, received = self._begun[number ^ (number // 2 == self._mixed)]
        transfer.wait()
        if out is not None and received is not None:
            out.copy_(received)


def run_together(exchanges: Sequence[Exchanging[T]]) -> tuple[list[T], int]:
    """Run one exchange of each rank, in step; return what each returned, and the transfers."""
    results: dict[int, T] = {}
    n_transfers = 0
    while len(results) < len(exchanges):
        for rank, exchanging in enumerate(exchanges):
            try:
                next(exchanging)
            except StopIteration as end:
                results[rank] = end.value
        n_transfers += not results
    return [results[rank] for rank in range(len(exchanges))], n_transfers

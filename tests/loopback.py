"""A network inside one process: several ranks' exchanges, round by round, without processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.exchange import ByteCount, Exchanging, Link
from distlion.exchange.link import Transfer
from distlion.kernels import Kernels, choose_kernels

T = TypeVar("T")
CPU = torch.device("cpu")


class CountingKernels:
    """The kernels, and how many rows they have checked or signed with a checksum."""

    def __init__(self) -> None:
        self.kernels = choose_kernels(CPU)
        self.n_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def checksums(self, rows: Tensor, starts: Tensor | int) -> Tensor:
        self.n_rows += len(rows)
        return self.kernels.checksums(rows, starts)


class LoopbackLink(Link):
    """One rank's end of a network of ``n`` ranks; all their ends share ``posts``."""

    def __init__(self, rank: int, n: int, posts: dict[int, dict[int, Any]]) -> None:
        self.process_group = cast(dist.ProcessGroup, None)
        self.wire_device = CPU
        self.counting = CountingKernels()
        self.kernels = cast(Kernels, self.counting)
        self.rank, self.world_size, self.ranks = rank, n, tuple(range(n))
        self.timeout_s, self.watch, self.counted = 1.0, None, ByteCount()
        self.n_under_way = 0
        self._posts, self._n_started = posts, 0

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int) -> Transfer:
        n_bytes, peers = chunks[0].nbytes, self.world_size - 1

        def take(posts: dict[int, Tensor]) -> None:
            for peer, rows in posts.items():
                out[peer] = rows[self.rank]

        sent = ByteCount(peers * n_bytes, peers * n_bytes, peers)
        return self._begin("all-to-all", chunks, take, sent, step)

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int) -> Transfer:
        return self.all_to_all(out, chunk.expand(self.world_size, -1), step=step)

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int) -> Transfer:
        def take(posts: dict[int, Tensor]) -> None:
            for peer, row in posts.items():
                if out is not None:
                    out[peer] = row

        peers = self.world_size - 1
        sent = ByteCount(0, peers * chunk.nbytes) if self.rank == 0 else ByteCount(chunk.nbytes)
        sent += ByteCount(messages=int(self.rank > 0))
        return self._begin("gather", chunk, take, sent, step)

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int) -> Transfer:
        def take(posts: dict[int, Tensor | None]) -> None:
            rows = posts[0]
            assert rows is not None
            out.copy_(rows[self.rank])

        peers = self.world_size - 1
        sent = ByteCount(0, out.nbytes)
        if self.rank == 0:
            sent = ByteCount(peers * out.nbytes, 0, peers)
        return self._begin("scatter", chunks, take, sent, step)

    def _begin(
        self,
        what: str,
        post: Tensor | None,
        take: Callable[[Any], None],
        sent: ByteCount,
        step: int,
    ) -> Transfer:
        posts = self._posts[self._n_started]
        self._n_started += 1
        posts[self.rank] = (what, None if post is None else post.clone())

        def wait(timeout: timedelta) -> None:
            assert len(posts) == self.world_size, "waits for a transfer that others did not begin"
            assert {name for name, _ in posts.values()} == {what}, "another collective"
            take({peer: data for peer, (_, data) in posts.items()})

        work = type("Work", (), {"wait": staticmethod(wait)})()
        return Transfer(self, lambda: cast(dist.Work, work), sent, step=step, what=what)


def make_links(n: int) -> list[LoopbackLink]:
    """Make the ends of a network."""
    posts: dict[int, dict[int, Any]] = defaultdict(dict)
    return [LoopbackLink(rank, n, posts) for rank in range(n)]


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

"""Transport inside one process: the members share a list of begun collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlion.errors import StepError
from distlion.failures import FailureKind
from distlion.kernels.dispatch import choose_kernels
from distlion.kernels.reference import Kernels
from distlion.wire.finding import Finding, describe_loss
from distlion.wire.groups import HOST
from distlion.wire.transport import ByteCount

_Post = Tensor | None
_Posts = dict[int, tuple[str, _Post]]
_LIMITS = "every member must begin a collective before one of them waits for it"


@dataclass
class _Board:
    """Collectives that have begun: by number, then by member."""

    posts: defaultdict[int, _Posts] = field(default_factory=lambda: defaultdict(dict))
    by_pair: dict[tuple[int, int], _Board] = field(default_factory=dict)


class Memory:
    """A ``Transport`` between workers of one process, which take turns.

    Nothing blocks: all members must have begun a collective before one of them waits for it.

    Args:
        board: The board of all members.
        rank: The place of this member among them.
        ranks: The rank of each member among all workers.
    """

    def __init__(self, board: _Board, rank: int, ranks: tuple[int, ...]) -> None:
        self.wire_device = HOST
        self.ring_above_bytes: int | None = None
        self.kernels: Kernels = choose_kernels(self.wire_device)
        self.timeout_s = 0.0
        self.rank, self.n_members, self.ranks = rank, len(ranks), ranks
        self.counted = ByteCount()
        self.gathered_bytes = 0
        self._board, self._n_begun = board, 0
        self._pairs: dict[int, Memory] = {}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")

    def all_to_all(self, out: Tensor, chunks: Tensor, *, step: int | None) -> MemoryTransfer:
        n_bytes, peers = chunks[0].nbytes, self.n_members - 1

        def take(posts: dict[int, Tensor]) -> None:
            for peer, rows in posts.items():
                out[peer] = rows[self.rank]

        sent = ByteCount(peers * n_bytes, peers * n_bytes, peers)
        return self._begin("all-to-all", chunks, take, sent, step)

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int | None) -> MemoryTransfer:
        self.gathered_bytes = max(self.gathered_bytes, chunk.nbytes)
        return self.all_to_all(out, chunk.expand(self.n_members, -1), step=step)

    def gather(self, out: Tensor | None, chunk: Tensor, *, step: int | None) -> MemoryTransfer:
        def take(posts: dict[int, Tensor]) -> None:
            for peer, row in posts.items():
                if out is not None:
                    out[peer] = row

        peers = self.n_members - 1
        sent = ByteCount(chunk.nbytes, 0, 1)
        if self.rank == 0:
            sent = ByteCount(0, peers * chunk.nbytes, 0)
        return self._begin("gather", chunk, take, sent, step)

    def scatter(self, out: Tensor, chunks: Tensor | None, *, step: int | None) -> MemoryTransfer:
        def take(posts: dict[int, Tensor]) -> None:
            out.copy_(posts[0][self.rank])

        peers = self.n_members - 1
        sent = ByteCount(0, out.nbytes, 0)
        if self.rank == 0:
            sent = ByteCount(peers * out.nbytes, 0, peers)
        return self._begin("scatter", chunks, take, sent, step)

    def connect(self, peer: int, *, timeout_s: float | None = None) -> None:
        if peer not in self._pairs:
            low, high = min(self.rank, peer), max(self.rank, peer)
            board = self._board.by_pair.setdefault((low, high), _Board())
            ranks = self.ranks[low], self.ranks[high]
            self._pairs[peer] = Memory(board, int(self.rank == high), ranks)

    def swap(self, out: Tensor, chunk: Tensor, *, peer: int, step: int | None) -> MemoryTransfer:
        self.connect(peer)
        pair = self._pairs[peer]

        def take(posts: dict[int, Tensor]) -> None:
            out.copy_(posts[1 - pair.rank])

        sent = ByteCount(chunk.nbytes, out.nbytes, int(chunk.nbytes > 0))
        self.counted += sent
        return pair._begin("swap", chunk, take, sent, step)

    def broadcast(self, tensor: Tensor, *, step: int | None, source: int = 0) -> MemoryTransfer:
        def take(posts: dict[int, Tensor]) -> None:
            tensor.copy_(posts[source])

        return self._begin("broadcast", tensor, take, ByteCount(), step)

    def check_present(self, *, step: int | None) -> None:
        """Return, as all members share this process."""

    def failure(self, kind: FailureKind, step: int | None, what: str) -> StepError:
        last = self._board.posts.get(self._n_begun - 1)
        return self._describe(kind, step, what, range(self.n_members) if last is None else last)

    def _describe(
        self, kind: FailureKind, step: int | None, what: str, begun: Collection[int]
    ) -> StepError:
        """Return the error of a collective that only the members in ``begun`` have begun."""
        absent = tuple(rank for place, rank in enumerate(self.ranks) if place not in begun)
        found = Finding(kind, absent, note=what if kind == "order" else "")
        rank = self.ranks[self.rank]
        return describe_loss(found, rank=rank, step=step, what=what, limits=_LIMITS)

    def _begin(
        self,
        what: str,
        post: _Post,
        take: Callable[[dict[int, Any]], None],
        sent: ByteCount,
        step: int | None,
    ) -> MemoryTransfer:
        number, self._n_begun = self._n_begun, self._n_begun + 1
        posts = self._board.posts[number]
        posts[self.rank] = (what, post.clone() if isinstance(post, Tensor) else post)
        if len(posts) == self.n_members:  # from here on the transfers hold it
            del self._board.posts[number]
        self.counted += sent
        return MemoryTransfer(partial(self._end, posts, what, take, step))

    def _end(
        self,
        posts: _Posts,
        what: str,
        take: Callable[[dict[int, Any]], None],
        step: int | None,
    ) -> None:
        if len(posts) < self.n_members:
            raise self._describe("silent", step, f"the {what} has not begun everywhere", posts)
        if {name for name, _ in posts.values()} != {what}:
            names = sorted({name for name, _ in posts.values()})
            raise self._describe("order", step, f"members are at {' and '.join(names)}", posts)
        take({peer: data for peer, (_, data) in posts.items()})


@dataclass(frozen=True)
class MemoryTransfer:
    """A collective that every member has begun before one of them waits for it.

    Attributes:
        end: Function that takes the others' data.
        is_held: False, as it has begun.
    """

    end: Callable[[], None]
    is_held: bool = False

    def begin(self) -> None:
        """Do nothing, as it has begun."""

    def wait(self) -> None:
        self.end()


def connect_in_memory(n_members: int) -> list[Memory]:
    """Return the ends of a transport between ``n_members`` workers of this process."""
    board, ranks = _Board(), tuple(range(n_members))
    return [Memory(board, rank, ranks) for rank in ranks]

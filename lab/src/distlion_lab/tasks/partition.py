"""Partitions of the training data among workers: the same mix for all, or a skewed one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from distlion_lab.tasks.base import seeded_generator

DRAWS = 1000
# Separates this stream from the orders and windows, which start from the same seed.
_OWNER_STREAM = 0x6F776E6572


class TextPartition(Protocol):
    """A partition of a text that consists of books."""

    def split_text(
        self, book_tokens: Sequence[int], *, world_size: int, block_tokens: int
    ) -> list[list[range]]:
        """Return each rank's spans of the text.

        Args:
            book_tokens: Lengths of the books in tokens, in the order of the text; at least 0.
            world_size: Number of ranks, at least 1.
            block_tokens: Least length of a block, if the text is cut into blocks; at least 1.

        Returns:
            For each rank, spans in ascending order with gaps between them. All spans of all ranks
            cover the text once. A rank may own nothing.
        """


class ImagePartition(Protocol):
    """A partition of labeled images."""

    def split_images(
        self, labels: Tensor, *, seed: int, world_size: int, batch_size: int
    ) -> list[Tensor]:
        """Return the images that each rank owns.

        Args:
            labels: (n,) int64 class of each image, 0 or above. Read only.
            seed: Seed of the partition.
            world_size: Number of ranks, at least 1.
            batch_size: Images of a worker in a step, at least 1.

        Returns:
            For each rank, (n_rank,) int64 numbers of images, in an order that ``seed`` fixes. Each
            image belongs to one rank. With one rank, all partitions give the same order.

        Raises:
            DataError: The partition needs more images than there are.
        """


@dataclass(frozen=True)
class Even:
    """A partition that gives every worker the same mix.

    Images: rank r of N owns every N-th of a permutation. Text: rank r owns every N-th of equal
    blocks, so all ranks share each book that is long enough.
    """

    def split_images(
        self, labels: Tensor, *, seed: int, world_size: int, batch_size: int
    ) -> list[Tensor]:
        order = _permute(labels, seed)
        return [order[rank::world_size] for rank in range(world_size)]

    def split_text(
        self, book_tokens: Sequence[int], *, world_size: int, block_tokens: int
    ) -> list[list[range]]:
        # Equally many blocks for each rank; a text too short for that has one for each.
        rounds = max(1, sum(book_tokens) // (world_size * block_tokens))
        blocks = _cut(sum(book_tokens), rounds * world_size)
        return [_join(blocks[rank::world_size]) for rank in range(world_size)]


@dataclass(frozen=True)
class Contiguous:
    """A partition that gives rank r the r-th of N equal parts of a text; skewed by book."""

    def split_text(
        self, book_tokens: Sequence[int], *, world_size: int, block_tokens: int
    ) -> list[list[range]]:
        return [_join([part]) for part in _cut(sum(book_tokens), world_size)]


@dataclass(frozen=True)
class ByBook:
    """A partition by whole books: skewed by book, and no two workers share a book.

    Books are dealt from the longest to the shortest, each to the rank with the fewest tokens so
    far, and to the lowest of equal ranks.

    Reference:
        R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: the largest share is
        below 4/3 of the least possible largest share.
    """

    def split_text(
        self, book_tokens: Sequence[int], *, world_size: int, block_tokens: int
    ) -> list[list[range]]:
        ends = [0, *accumulate(book_tokens)]
        books = [range(begin, end) for begin, end in pairwise(ends)]
        loads = [(0, rank) for rank in range(world_size)]
        owned: list[list[range]] = [[] for _ in range(world_size)]
        for book in sorted(books, key=len, reverse=True):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + len(book), rank))
            owned[rank].append(book)
        return [_join(sorted(spans, key=lambda span: span.start)) for spans in owned]


@dataclass(frozen=True)
class ByClass:
    """A partition that skews the classes of each worker's images by Dirichlet draws.

    Equation:
        p_c ~ Dirichlet(alpha, ..., alpha) over the N workers, for each class c on its own.
        Rank r owns the share p_cr of the images of class c, rounded at the cuts.

    Args:
        alpha: Concentration, finite and above 0. Towards 0 each class goes to one worker; towards
            infinity every worker gets the same mix.

    Raises:
        InvalidArgumentError: ``alpha`` is out of range.

    Notes:
        All classes are redrawn, at most 1,000 times, until every worker has the images of a batch.
        Small alpha with many workers is therefore slightly less skewed than a single draw. Shards
        differ in size too; each worker repeats its own at its own pace.

    Reference:
        Li et al., arXiv:2102.02079, "distribution-based label imbalance". Hsu et al.,
        arXiv:1909.06335, draw the other way round: for each worker, over the classes.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidArgumentError(f"alpha is {self.alpha}; expected a finite number above 0")

    def split_images(
        self, labels: Tensor, *, seed: int, world_size: int, batch_size: int
    ) -> list[Tensor]:
        """Return the images that each rank owns.

        Raises:
            DataError: No draw gives every worker the images of a batch.
        """
        order = _permute(labels, seed)
        ends = self._draw_ends(
            torch.bincount(labels).numpy(), seed, world_size=world_size, batch_size=batch_size
        )
        shards: list[list[Tensor]] = [[] for _ in range(world_size)]
        for label, label_ends in enumerate(ends):
            places = torch.nonzero(labels[order] == label).flatten()
            for shard, part in zip(
                shards, places.tensor_split(label_ends[:-1].tolist()), strict=True
            ):
                shard.append(part)
        # Images stay in the order of the permutation, not class by class.
        return [order[torch.cat(parts).sort().values] for parts in shards]

    def _draw_ends(
        self, class_sizes: npt.NDArray[np.int64], seed: int, *, world_size: int, batch_size: int
    ) -> npt.NDArray[np.int64]:
        """Return the end of each rank's share in each class, (classes, world_size)."""
        generator = np.random.default_rng((seed, _OWNER_STREAM))
        for _ in range(DRAWS):
            shares = generator.dirichlet(np.full(world_size, self.alpha), size=len(class_sizes))
            ends = (shares.cumsum(axis=1) * class_sizes[:, None]).astype(np.int64)
            ends[:, -1] = class_sizes
            if np.diff(ends, axis=1, prepend=0).sum(axis=0).min() >= batch_size:
                return ends
        raise DataError(
            f"none of {DRAWS} draws with alpha {self.alpha} gives each of {world_size} workers the "
            f"{batch_size} images of a batch, out of {class_sizes.sum()}; take a larger alpha, "
            f"fewer workers or a smaller batch"
        )


def _permute(labels: Tensor, seed: int) -> Tensor:
    return torch.randperm(len(labels), generator=seeded_generator(seed), device="cpu")


def _cut(total: int, parts: int) -> list[range]:
    """Cut 0 .. total - 1 into parts with lengths that differ by at most 1."""
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]


def _join(spans: Sequence[range]) -> list[range]:
    """Join ascending spans that touch, and leave out empty ones."""
    joined: list[range] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = range(joined[-1].start, span.stop)
        elif span:
            joined.append(span)
    return joined

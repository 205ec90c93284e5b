"""Where a coordinate lives on the wire: words, blocks, shards and buckets.

A parameter is a flat row of coordinates, padded to whole words of 64. Parameters that share a rule,
a dtype and a device lie one after the other in a *bucket*, which is padded to ``n_shards`` equal
*shards* of whole *blocks*; shard i is counted by its *owner*, rank i. A vote of several bits a
coordinate is cut into bit *planes*.

    word    64 coordinates of one parameter: coordinate j is bit j % 64, lowest first, of word
            j // 64
    block   8 words (512 coordinates, 64 bytes) of each plane in turn
    shard   whole blocks, the same number for every owner
    wire    (n_shards * shard_blocks, n_planes, 8) little-endian int64: owner, block, plane

docs/algorithms.md draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

WORD_ELEMENTS = 64
BLOCK_WORDS = 8
PLANE_BYTES = 8 * BLOCK_WORDS
ALIGN_BYTES = 64
"""Parts of a chunk begin at multiples of this."""
SCALE_ELEMENTS = 256
"""Coordinates of an int8 row that share a scale; shards are a multiple of it."""

_FLOAT_BYTES = 4


def count_words(n_elements: int) -> int:
    """Count the words that ``n_elements`` coordinates of one parameter fill, perhaps in part."""
    return -(-n_elements // WORD_ELEMENTS)


def pad_bytes(n_bytes: int) -> int:
    """Round up to where the next part of a chunk begins."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Slot(NamedTuple):
    """The place of one parameter; the C++ core reads its fields by position.

    Attributes:
        name: What errors call it.
        n_elements: Number of coordinates.
        first_word: Its first word among all trainable parameters in group order. Coins are drawn by
            this number, so that they depend neither on buckets nor on shards.
        bucket_word: Its first word inside its bucket.
    """

    name: str
    n_elements: int
    first_word: int
    bucket_word: int

    @property
    def n_words(self) -> int:
        """Number of words, the last one perhaps partly spare."""
        return count_words(self.n_elements)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together.

    Attributes:
        index: Number of the bucket, in the order in which buckets are exchanged.
        members: For each slot, the position of its parameter among the trainable ones.
        slots: Their places, in the order in which they are packed.
        n_shards: Number of owners, the world size.
    """

    index: int
    members: tuple[int, ...]
    slots: tuple[Slot, ...]
    n_shards: int

    @property
    def shard_blocks(self) -> int:
        """Blocks that each owner counts."""
        n_words = self.slots[-1].bucket_word + self.slots[-1].n_words if self.slots else 0
        return -(-n_words // (BLOCK_WORDS * self.n_shards))

    @property
    def n_blocks(self) -> int:
        """Blocks of the whole bucket, padding included."""
        return self.shard_blocks * self.n_shards

    def shard_bytes(self, n_planes: int) -> int:
        """Bytes of one shard of ``n_planes`` bits a coordinate."""
        return self.shard_blocks * n_planes * PLANE_BYTES


@dataclass(frozen=True)
class BucketShape:
    """Sizes of a bucket on the wire.

    Attributes:
        n_shards: Owners, the world size.
        n_params: Parameters.
        vote_bytes: Bytes of a vote on one shard.
        reply_bytes: Bytes of the reply on one shard.
        has_counts: Whether replies say how many workers voted for each parameter.
    """

    n_shards: int
    n_params: int
    vote_bytes: int
    reply_bytes: int
    has_counts: bool


def place_parameters(names: Sequence[str], sizes: Sequence[int]) -> tuple[Slot, ...]:
    """Give every trainable parameter its global words, in group order.

    Their ``bucket_word`` is set by ``fill_buckets``.
    """
    ends = itertools.accumulate((count_words(size) for size in sizes), initial=0)
    return tuple(
        Slot(name, size, word, 0) for name, size, word in zip(names, sizes, ends, strict=False)
    )


def fill_buckets(
    slots: Sequence[Slot],
    kinds: Sequence[Hashable],
    *,
    n_shards: int,
    bucket_elements: int,
    backwards: bool = False,
) -> tuple[Bucket, ...]:
    """Put parameters of one kind (rule, dtype, device) into buckets, in group order.

    Args:
        slots: All trainable parameters.
        kinds: What must be equal within a bucket, for each slot. Buckets come in the order in which
            kinds appear.
        n_shards: The world size.
        bucket_elements: A bucket takes no further parameter once it would hold more coordinates
            than this. A parameter is never cut: a larger one has a bucket of its own.
        backwards: Take parameters from the last to the first, as their gradients arrive, and let
            buckets come in the order in which that completes them.
    """
    by_kind: dict[Hashable, list[int]] = {}
    positions = range(len(slots))
    for position in reversed(positions) if backwards else positions:
        if slots[position].n_elements:
            by_kind.setdefault(kinds[position], []).append(position)
    groups = [part for kind in by_kind.values() for part in _split(slots, kind, bucket_elements)]
    if backwards:
        groups.sort(key=min, reverse=True)
    return tuple(
        Bucket(index, tuple(part), _pack(slots[i] for i in part), n_shards)
        for index, part in enumerate(groups)
    )


def shape_momenta(n_elements: int, n_workers: int, dtype: torch.dtype) -> BucketShape:
    """Size the exchange of ``n_elements`` momenta of each worker.

    Equation:
        shard = 256 ceil(n / (256 N)) coordinates; up ``dtype`` each, int8 with a float32 scale for
        every 256; down the mean in float32

    Args:
        n_elements: n, coordinates that move in one exchange.
        n_workers: N.
        dtype: What momenta are rounded to on the way up: float32, bfloat16 or int8.
    """
    shard = -(-n_elements // (SCALE_ELEMENTS * n_workers)) * SCALE_ELEMENTS
    scale_bytes = _FLOAT_BYTES * shard // SCALE_ELEMENTS if dtype is torch.int8 else 0
    vote_bytes = shard * dtype.itemsize + scale_bytes
    return BucketShape(
        n_shards=n_workers,
        n_params=1,
        vote_bytes=pad_bytes(vote_bytes),
        reply_bytes=shard * _FLOAT_BYTES,
        has_counts=False,
    )


class Cutter:
    """Cut parameters, one after the other, into one piece for each part, of about equal size.

    Pieces depend on a parameter and those that were cut before it only; the parts that get a unit
    more take turns.

    Args:
        n_parts: Number of parts.
        unit_elements: Pieces begin at multiples of this; a multiple of 64.
    """

    def __init__(self, n_parts: int, unit_elements: int) -> None:
        self._n_parts = n_parts
        self._unit_elements = unit_elements
        self._turn = 0

    def cut(self, n_elements: int) -> tuple[tuple[int, int], ...]:
        """Cut the next parameter: (start, stop) of each part, some perhaps empty."""
        least, more = divmod(-(-n_elements // self._unit_elements), self._n_parts)
        units = [
            least + ((part - self._turn) % self._n_parts < more) for part in range(self._n_parts)
        ]
        self._turn = (self._turn + more) % self._n_parts
        ends = itertools.accumulate(units, initial=0)
        return tuple(itertools.pairwise(min(n_elements, end * self._unit_elements) for end in ends))


def take_part(
    bucket: Bucket, pieces: Sequence[Sequence[tuple[int, int]]], part: int, *, n_shards: int
) -> Bucket:
    """Return the bucket of the pieces that one part has of another bucket.

    Args:
        bucket: Of whole parameters.
        pieces: (start, stop) of each part, for all trainable parameters.
        part: Which part.
        n_shards: Owners of the new bucket.
    """
    cut = [
        (position, slot, *pieces[position][part])
        for position, slot in zip(bucket.members, bucket.slots, strict=True)
    ]
    kept = [entry for entry in cut if entry[2] < entry[3]]
    slots = _pack(
        Slot(slot.name, stop - start, slot.first_word + start // WORD_ELEMENTS, 0)
        for _, slot, start, stop in kept
    )
    return Bucket(bucket.index, tuple(entry[0] for entry in kept), slots, n_shards)


def _split(slots: Sequence[Slot], positions: list[int], bucket_elements: int) -> list[list[int]]:
    parts: list[list[int]] = []
    filled = bucket_elements
    for position in positions:
        n_elements = slots[position].n_words * WORD_ELEMENTS
        if not parts or filled + n_elements > bucket_elements:
            parts.append([])
            filled = 0
        parts[-1].append(position)
        filled += n_elements
    return parts


def _pack(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    packed: list[Slot] = []
    word = 0
    for slot in slots:
        packed.append(Slot(slot.name, slot.n_elements, slot.first_word, word))
        word += slot.n_words
    return tuple(packed)

"""The layout of elements on the wire, and its sizes: words, blocks, shards, buckets.

A parameter is a flat row of elements, padded to whole words of 64. Parameters that share a rule, a
dtype and a device lie one after the other in a *bucket*, which is padded to ``n_shards`` equal
*shards* of whole *blocks*; shard i is counted by its *owner*. A vote of several bits per element is
cut into bit *planes*.

    word    64 elements of one parameter: element j is bit j % 64, lowest first, of word j // 64
    block   8 words (512 elements, 64 bytes) of each plane in turn
    shard   whole blocks, the same number for every owner
    wire    (n_shards * shard_blocks, n_planes, 8) little-endian int64: owner, block, plane
    scales  float32 numbers of a vote or a reply for each parameter, behind the planes of each shard
    chunk   what one rank sends to one other: a frame (header, presence, counts) and a payload

studies/wire-format.md draws it. Sizes on the wire are computed here and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distlion.errors import InvalidArgumentError

WORD_ELEMENTS = 64
BLOCK_WORDS = 8
PLANE_BYTES = 8 * BLOCK_WORDS
ALIGN_BYTES = 64
"""Parts of a chunk begin at multiples of this."""
HEADER_BYTES = 64
"""Bytes of the header that every chunk begins with."""

_COUNT_BYTES, FLOAT_BYTES, _DOUBLE_BYTES = 2, 4, 8


def count_words(n_elements: int) -> int:
    """Count the words for ``n_elements`` elements of one parameter; the last may be partial."""
    return -(-n_elements // WORD_ELEMENTS)


def count_sum_planes(vote_planes: int, n_votes: int) -> int:
    """Count the bits of a sum of votes, each from 0 to 2^p - 1."""
    return (n_votes * ((1 << vote_planes) - 1)).bit_length()


def pad_bytes(n_bytes: int) -> int:
    """Round up to the start of the next part of a chunk."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Slot(NamedTuple):
    """The place of one parameter; the C++ core reads its fields by position.

    Attributes:
        name: Its name in errors.
        n_elements: Number of elements.
        first_word: Its first word among all trainable parameters in group order. Coins are drawn by
            this number, so that they depend neither on buckets nor on shards.
        bucket_word: Its first word inside its bucket.
        first_bit: The bit of its first element in its first word: a shard may begin anywhere.
    """

    name: str
    n_elements: int
    first_word: int
    bucket_word: int
    first_bit: int = 0

    @property
    def n_words(self) -> int:
        """Number of words; the last one may be partly empty."""
        return count_words(self.n_elements)


@dataclass(frozen=True)
class BucketLayout:
    """Parameters that travel together.

    Attributes:
        index: Number of the bucket, in the order in which buckets are exchanged.
        members: For each slot, the position of its parameter among the trainable ones.
        slots: The places of the parameters, in packing order.
        n_shards: Number of shards, each counted by its owner.
    """

    index: int
    members: tuple[int, ...]
    slots: tuple[Slot, ...]
    n_shards: int

    @functools.cached_property
    def shard_blocks(self) -> int:
        """Blocks that each owner counts."""
        n_words = self.slots[-1].bucket_word + self.slots[-1].n_words if self.slots else 0
        return -(-n_words // (BLOCK_WORDS * self.n_shards))

    @functools.cached_property
    def n_blocks(self) -> int:
        """Blocks of the whole bucket, padding included."""
        return self.shard_blocks * self.n_shards

    @functools.cached_property
    def cuts(self) -> tuple[tuple[tuple[int, Slot], ...], ...]:
        """For each shard, the number of every parameter there, and the place of its part."""
        return tuple(tuple(self._cut(shard)) for shard in range(self.n_shards))

    def _cut(self, shard: int) -> Iterator[tuple[int, Slot]]:
        n_words = self.shard_blocks * BLOCK_WORDS
        begin, end = shard * n_words, (shard + 1) * n_words
        for index, slot in enumerate(self.slots):
            first = max(begin, slot.bucket_word)
            last = min(end, slot.bucket_word + slot.n_words)
            if first < last:
                skipped = first - slot.bucket_word
                stop = min(slot.n_elements, (last - slot.bucket_word) * WORD_ELEMENTS)
                yield (
                    index,
                    slot._replace(
                        n_elements=stop - skipped * WORD_ELEMENTS,
                        first_word=slot.first_word + skipped,
                        bucket_word=first,
                    ),
                )

    def shape(
        self,
        *,
        vote_planes: int,
        reply_planes: int,
        has_counts: bool,
        has_partial_sums: bool,
        n_scales: int = 0,
        n_reply_scales: int = 0,
    ) -> BucketShape:
        """Size its votes and replies on the wire.

        Args:
            vote_planes: Bits per element of a vote.
            reply_planes: Bits per element of a reply.
            has_counts: Whether replies carry the number of votes for each parameter.
            has_partial_sums: Whether votes can be counted in parts.
            n_scales: Scales per parameter in a vote.
            n_reply_scales: Scales per parameter in a reply.
        """
        scales_bytes = pad_bytes(FLOAT_BYTES * n_scales * len(self.slots))
        reply_scales_bytes = pad_bytes(FLOAT_BYTES * n_reply_scales * len(self.slots))
        return BucketShape(
            n_shards=self.n_shards,
            n_params=len(self.slots),
            vote_bytes=self.shard_blocks * vote_planes * PLANE_BYTES + scales_bytes,
            reply_bytes=self.shard_blocks * reply_planes * PLANE_BYTES + reply_scales_bytes,
            has_counts=has_counts,
            plane_bytes=self.shard_blocks * PLANE_BYTES if has_partial_sums else None,
            scales_bytes=scales_bytes,
            reply_scales_bytes=reply_scales_bytes,
        )


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of a chunk, known to both sides beforehand.

    Attributes:
        n_params: Parameters of the bucket.
        payload_bytes: Bytes of votes or of a reply; a multiple of 64.
        has_counts: Whether it carries the number of votes for each parameter, rather than one bit.
    """

    n_params: int
    payload_bytes: int
    has_counts: bool = False

    @functools.cached_property
    def bitmap_bytes(self) -> int:
        """Bytes of the presence bitmap."""
        return pad_bytes(-(-self.n_params // 8))

    @functools.cached_property
    def counts_bytes(self) -> int:
        """Bytes of the counts, two for each parameter; 0 without."""
        return pad_bytes(_COUNT_BYTES * self.n_params) if self.has_counts else 0

    @functools.cached_property
    def front_bytes(self) -> int:
        """Bytes before the payload."""
        return HEADER_BYTES + self.bitmap_bytes + self.counts_bytes

    @functools.cached_property
    def n_bytes(self) -> int:
        """Bytes of the whole chunk."""
        return self.front_bytes + self.payload_bytes


@dataclass(frozen=True)
class BucketShape:
    """Sizes of a bucket on the wire.

    Attributes:
        n_shards: Shards, each of which has an owner.
        n_params: Parameters.
        vote_bytes: Bytes of a vote on one shard, its scales included.
        reply_bytes: Bytes of the reply on one shard, its scales included.
        has_counts: Whether replies carry the number of votes for each parameter.
        plane_bytes: Bytes of one shard of a bit plane; None where votes have no partial counts.
        scales_bytes, reply_scales_bytes: Bytes of the scales at the end of a vote, and of a reply.
    """

    n_shards: int
    n_params: int
    vote_bytes: int
    reply_bytes: int
    has_counts: bool
    plane_bytes: int | None = None
    scales_bytes: int = 0
    reply_scales_bytes: int = 0

    @functools.cached_property
    def vote_chunk(self) -> ChunkShape:
        """Sizes of a chunk with a worker's vote on one shard."""
        return ChunkShape(self.n_params, self.vote_bytes)

    @functools.cached_property
    def reply_chunk(self) -> ChunkShape:
        """Sizes of a chunk with the reply on one shard."""
        return ChunkShape(self.n_params, self.reply_bytes, self.has_counts)

    @functools.cached_property
    def whole_vote_chunk(self) -> ChunkShape:
        """Sizes of a chunk with a worker's votes on all shards."""
        return ChunkShape(self.n_params, self.n_shards * self.vote_bytes)

    @functools.cached_property
    def whole_reply_chunk(self) -> ChunkShape:
        """Sizes of a chunk with the reply on all shards."""
        return ChunkShape(self.n_params, self.n_shards * self.reply_bytes, self.has_counts)

    def sum_chunk(self, n_votes: int) -> ChunkShape:
        """Return sizes of the headers of so many votes and their sum.

        Raises:
            InvalidArgumentError: These votes cannot be counted in parts.
        """
        if self.plane_bytes is None:
            raise InvalidArgumentError(
                "this pattern counts votes in parts, and these are floats, which are added in rank "
                "order. Expected votes of integers: use a rule that has them, or AllReduce()"
            )
        planes = count_sum_planes(self.vote_bytes // max(1, self.plane_bytes), n_votes)
        sum_bytes = self.n_shards * planes * self.plane_bytes
        return ChunkShape(self.n_params, HEADER_BYTES * n_votes + sum_bytes, n_votes > 1)


@dataclass(frozen=True)
class NodeShape:
    """Sizes of the chunks that the ranks of a node exchange for one bucket.

    Attributes:
        gradients: A rank's gradients for one part.
        replies: The reply on one part, padded to the largest part's.
    """

    gradients: ChunkShape
    replies: ChunkShape


def place_parameters(names: Sequence[str], sizes: Sequence[int]) -> tuple[Slot, ...]:
    """Give every trainable parameter its global words, in group order, but no bucket yet."""
    ends = itertools.accumulate((count_words(size) for size in sizes), initial=0)
    places = zip(names, sizes, ends, strict=False)
    return tuple(Slot(name, size, word, 0) for name, size, word in places)


def fill_buckets(
    slots: Sequence[Slot],
    kinds: Sequence[Hashable],
    *,
    n_shards: int,
    bucket_elements: int,
    backwards: bool = False,
) -> tuple[BucketLayout, ...]:
    """Put parameters of one kind (rule, dtype, device) into buckets, in group order.

    Args:
        slots: All trainable parameters.
        kinds: The kind of each slot, equal within a bucket. Buckets come in the order in which
            kinds appear.
        n_shards: Shards of a bucket.
        bucket_elements: Most elements of several parameters in a bucket. A parameter is never cut:
            a larger one has a bucket of its own.
        backwards: Take parameters from the last to the first, as their gradients arrive, and order
            buckets by their completion.
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
        BucketLayout(index, tuple(part), _pack(slots[i] for i in part), n_shards)
        for index, part in enumerate(groups)
    )


def bucket_of_one(n_elements: int, n_shards: int) -> BucketLayout:
    """Return a bucket of one parameter without a name."""
    return BucketLayout(0, (0,), (Slot("", n_elements, 0, 0),), n_shards)


def shape_momenta(n_elements: int, n_workers: int, dtype: torch.dtype) -> BucketShape:
    """Size the exchange of ``n_elements`` momenta of each worker.

    Equation:
        shard = 64 ceil(n / (64 N)) elements; up ``dtype`` each, down the mean in float32

    Args:
        n_elements: n, elements that move in one exchange.
        n_workers: N.
        dtype: Dtype of the momenta that are sent: float32 or bfloat16.
    """
    shard = -(-n_elements // (WORD_ELEMENTS * n_workers)) * WORD_ELEMENTS
    return BucketShape(
        n_shards=n_workers,
        n_params=1,
        vote_bytes=shard * dtype.itemsize,
        reply_bytes=shard * FLOAT_BYTES,
        has_counts=False,
    )


def shape_numbers(n_numbers: int) -> ChunkShape:
    """Size a chunk of ``n_numbers`` doubles."""
    return ChunkShape(0, pad_bytes(_DOUBLE_BYTES * n_numbers))


def shape_node(
    n_params: int,
    parts: Sequence[BucketLayout],
    part_shapes: Sequence[BucketShape],
    dtype: torch.dtype,
) -> NodeShape:
    """Size the chunks that the ranks of a node exchange for one bucket.

    Args:
        n_params: Parameters of the bucket.
        parts: For each rank of the node, the bucket of the pieces that it votes for.
        part_shapes: Their sizes between nodes.
        dtype: Dtype of the gradients.
    """
    most_elements = max(sum(slot.n_elements for slot in part.slots) for part in parts)
    return NodeShape(
        gradients=ChunkShape(n_params, pad_bytes(most_elements * dtype.itemsize)),
        replies=ChunkShape(
            max(shape.n_params for shape in part_shapes),
            max(shape.n_shards * shape.reply_bytes for shape in part_shapes),
            part_shapes[0].has_counts,
        ),
    )


def take_part(
    bucket: BucketLayout, pieces: Sequence[Sequence[tuple[int, int]]], part: int, *, n_shards: int
) -> BucketLayout:
    """Return the bucket of the pieces that one part has of another bucket.

    Args:
        bucket: The bucket of whole parameters.
        pieces: (start, stop) of each part, for all trainable parameters. Nonempty pieces start at
            multiples of 64.
        part: Number of the part.
        n_shards: Shards of the new bucket.
    """
    members, slots = [], []
    for position, slot in zip(bucket.members, bucket.slots, strict=True):
        start, stop = pieces[position][part]
        if start < stop:
            assert start % WORD_ELEMENTS == 0
            word = slot.first_word + start // WORD_ELEMENTS
            members.append(position)
            slots.append(slot._replace(n_elements=stop - start, first_word=word))
    return BucketLayout(bucket.index, tuple(members), _pack(slots), n_shards)


def repack(bucket: BucketLayout, slots: Sequence[Slot]) -> BucketLayout:
    """Return a bucket of the same members with this rank's sizes, which may be 0."""
    return BucketLayout(bucket.index, bucket.members, _pack(slots), bucket.n_shards)


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
        packed.append(slot._replace(bucket_word=word))
        word += slot.n_words
    return tuple(packed)

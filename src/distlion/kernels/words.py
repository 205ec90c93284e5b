"""Words, bits, blocks and parts of a bucket in plain torch tensors, for the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.kernels.coin import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Coin
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout, Slot, count_words

# Number of elements widened at a time; whole blocks.
CHUNK_ELEMENTS = 1 << 20
LOTS = 1 << 16
"""Number of values that a lot may have."""

# Integers modulo 2^64, held in int64, whose sums and products wrap around.


def signed(value: int) -> int:
    """Reduce a number modulo 2^64 to its int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix_words(z: Tensor) -> Tensor:
    """Apply ``coin.mix`` to each word."""
    z = (z ^ _shift_right(z, 30)) * signed(MULTIPLIER_1)
    z = (z ^ _shift_right(z, 27)) * signed(MULTIPLIER_2)
    return z ^ _shift_right(z, 31)


# Bits, words and planes.


def pack(bits: Tensor) -> Tensor:
    """Pack (n,) of 0 and 1, any dtype, into (ceil(n / 64),) int64, spare bits 0."""
    padded = torch.zeros(
        count_words(bits.numel()) * WORD_ELEMENTS, dtype=torch.uint8, device=bits.device
    )
    padded[: bits.numel()] = bits
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) << shifts).sum(1, dtype=torch.uint8).view(torch.int64)


def unpack(words: Tensor, n_elements: int) -> Tensor:
    """Unpack (..., w) int64 into (..., n_elements) uint8 of 0 and 1, n_elements <= 64 w."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.contiguous().view(torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :n_elements]


def skip_bits(words: Tensor, n_bits: int) -> Tensor:
    """Shift (w + 1,) int64 to (w,): the words that begin ``n_bits``, 0 to 63, into the row."""
    if n_bits == 0:
        return words[:-1]
    return _shift_right(words[:-1], n_bits) | (words[1:] << (WORD_ELEMENTS - n_bits))


def split_planes(packed: Tensor) -> Tensor:
    """Turn (..., blocks, planes, 8), as on the wire, into (..., planes, 8 * blocks)."""
    return packed.transpose(-3, -2).flatten(-2)


def interleave(planes: Tensor, out: Tensor) -> None:
    """Write (planes, 8 * blocks) into ``out`` (blocks, planes, 8), as on the wire."""
    out.copy_(planes.view(planes.shape[0], -1, BLOCK_WORDS).transpose(0, 1))


# Coins.


def draw_words(coin: Coin, first_word: int, n_words: int, *, device: torch.device) -> Tensor:
    """Draw words ``first_word`` ... of a coin: (n_words,) int64."""
    w = torch.arange(first_word + 1, first_word + n_words + 1, dtype=torch.int64, device=device)
    words = mix_words(w * signed(GOLDEN) + signed(coin.key))
    return ~words if coin.inverted else words


def coin_bits(drawn: Coin, place: Slot | Run, *, device: torch.device) -> Tensor:
    """Draw a bit for each element of a parameter or a run of it: packed, including spare bits."""
    n_words = count_words(place.n_elements)
    words = draw_words(drawn, place.first_word, n_words + 1, device=device)
    return skip_bits(words, place.first_bit)


def draw_lots(lot: Coin, slot: Slot, *, device: torch.device) -> Tensor:
    """Draw a number from 0 to 65,535 for each element of a slot: (n,) int32."""
    first, skipped = divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)
    n_words = -(-(skipped + slot.n_elements) // 4)
    lanes = draw_words(lot, first, n_words, device=device).view(torch.int16)
    return (lanes[skipped : skipped + slot.n_elements].int() + LOTS) % LOTS


# Blocks of 4,096 elements.


def cut_blocks(flat: Tensor) -> Tensor:
    """Cut (n,) into (ceil(n / 4096), 4096), padded with zeros."""
    blocks = flat.new_zeros(-(-flat.numel() // SCALE_BLOCK_ELEMENTS), SCALE_BLOCK_ELEMENTS)
    blocks.view(-1)[: flat.numel()] = flat
    return blocks


def sum_by_halving(sums: Tensor) -> Tensor:
    """Sum (k, 4096) float64 to (k,) by a fixed tree."""
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def mean_by_halving(blocks: Tensor, n_elements: int) -> Tensor:
    """Average (k, 4096) float32, zero-padded, to (k,) float32 means of the n elements."""
    sums = sum_by_halving(blocks.double())
    counts = torch.full_like(sums, float(SCALE_BLOCK_ELEMENTS))
    counts[-1:] = n_elements - (blocks.shape[0] - 1) * SCALE_BLOCK_ELEMENTS
    return (sums / counts).float()


def tree_sum(sizes: Tensor) -> Tensor:
    """Add (n,) float32 in double, by halving; () float64."""
    sums = sizes.double()
    while sums.numel() > 1:
        sums = sum_by_halving(cut_blocks(sums))
    return sums[0]


def tree_mean(sizes: Tensor, count: int | Tensor) -> Tensor:
    """Add (n,) float32 in double, by halving; divide by ``count``; () float32."""
    return (tree_sum(sizes) / count).float()


def word_range(slot: Slot) -> slice:
    """Return the range of a slot's words in its bucket."""
    return slice(slot.bucket_word, slot.bucket_word + slot.n_words)


def element_range(slot: Slot) -> slice:
    """Return the range of a slot's elements in its bucket, padding counted."""
    start = slot.bucket_word * WORD_ELEMENTS
    return slice(start, start + slot.n_elements)


def read_steps(planes: Tensor, n_elements: int, scales: Tensor) -> Tensor:
    """Read q of each element of one parameter, (n,) float32, from (planes, words)."""
    bits = unpack(planes, n_elements)
    sizes = scales[0] if len(bits) == 1 else torch.where(bits[1] != 0, scales[1], scales[0])
    return torch.where(bits[0] != 0, sizes, -sizes)


@dataclass(frozen=True)
class Run:
    """The part of one parameter that lies in the blocks at hand.

    Attributes:
        voters: (n_votes,) int64 on the votes' device: rows of the workers present, each as often as
            its vote counts; one or more.
        words: Its words within the blocks.
        n_elements: Its elements there.
        first_word, first_bit: Its start among the coins, as in its slot.
    """

    voters: Tensor
    words: slice
    n_elements: int
    first_word: int
    first_bit: int

    def bits(self, planes: Tensor, plane: int) -> Tensor:
        """Take present workers' bits, (n_votes, n_elements), from (workers, planes, words)."""
        return unpack(planes[self.voters, plane, self.words], self.n_elements)


def cut_runs(
    bucket: BucketLayout, present: Tensor, first_block: int, n_blocks: int, *, device: torch.device
) -> Iterator[Run]:
    """Cut the bucket's parameters to a run of blocks; leave out parameters without votes."""
    begin, end = first_block * BLOCK_WORDS, (first_block + n_blocks) * BLOCK_WORDS
    for index, slot in enumerate(bucket.slots):
        first = max(begin, slot.bucket_word)
        last = min(end, slot.bucket_word + slot.n_words)
        times = present[:, index]
        voters = times.nonzero().flatten()
        if times.dtype != torch.bool:
            voters = voters.repeat_interleave(times[voters].to(torch.int64))
        if first < last and len(voters):
            skipped = first - slot.bucket_word
            n_elements = min(
                (last - first) * WORD_ELEMENTS, slot.n_elements - skipped * WORD_ELEMENTS
            )
            # A blocking copy would wait for the device.
            yield Run(
                voters.to(device, non_blocking=True),
                slice(first - begin, last - begin),
                n_elements,
                slot.first_word + skipped,
                slot.first_bit,
            )


def digest_bits(tensor: Tensor) -> Tensor:
    """Digest the bits of a tensor as defined in ``reference.Kernels.digests``: () int64."""
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    mask = (1 << 8 * tensor.element_size()) - 1
    flat = tensor.view(-1)
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, tensor.numel(), CHUNK_ELEMENTS):
        u = flat[start : start + CHUNK_ELEMENTS].view(unsigned).to(torch.int64) & mask
        j = torch.arange(start + 1, start + 1 + u.numel(), dtype=torch.int64, device=u.device)
        total += mix_words(u + j * signed(GOLDEN)).sum()
    return mix_words(total)

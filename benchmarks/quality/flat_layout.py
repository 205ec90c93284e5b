"""All parameters of a model as one flat row (elements,), and the library's coins for it.

A parameter begins at a whole word of 64 elements, so that element i of the row takes bit i % 64 of
word i // 64 of a coin, as in ``distlion.layout``. Elements between parameters are never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import study_path  # noqa: F401
import torch
from torch import Tensor, nn

from distlion.kernels.coin import GOLDEN, Coins
from distlion.kernels.words import SCALE_BLOCK_ELEMENTS, mix_words, signed
from distlion.layout import WORD_ELEMENTS, count_words


@dataclass(frozen=True)
class FlatLayout:
    """Places of all parameters in a row.

    Attributes:
        shapes: Of the parameters.
        begins: Of each parameter, the first element.
        sizes: Of each parameter, the number of elements.
        length: Elements of the row, a multiple of 64.
    """

    shapes: tuple[torch.Size, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> FlatLayout:
        """Lay out parameters in order."""
        sizes = tuple(param.numel() for param in params)
        padded = [count_words(size) * WORD_ELEMENTS for size in sizes]
        begins = tuple(itertools.accumulate(padded, initial=0))
        return cls(tuple(param.shape for param in params), begins[:-1], sizes, begins[-1])

    def view(self, row: Tensor) -> list[Tensor]:
        """Return a view of a row for each parameter."""
        parts = zip(self.begins, self.sizes, self.shapes, strict=True)
        return [row[begin : begin + size].view(shape) for begin, size, shape in parts]

    def adopt(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Copy parameters into a row, and turn them into views of it; return the row."""
        row = params[0].new_zeros(self.length)
        for param, view in zip(params, self.view(row), strict=True):
            view.copy_(param.detach())
            param.data = view
        return row


class CoinTable:
    """The tie coin and the workers' zero coins of every step of a run, drawn on the device.

    Args:
        layout: Of the row.
        workers: N.
        steps: Of a run.
        device: Where bits are drawn.
    """

    def __init__(self, layout: FlatLayout, workers: int, steps: int, device: torch.device) -> None:
        numbers = torch.arange(1, layout.length // WORD_ELEMENTS + 1, device=device)
        self._strides = numbers * signed(GOLDEN)
        self._places = torch.arange(8, dtype=torch.uint8, device=device)
        self._keys = torch.zeros(steps, 1 + workers, 1, dtype=torch.int64, device=device)
        self._flips = torch.zeros_like(self._keys)

    def start(self, seed: int) -> None:
        """Derive the keys of a run."""
        steps, n_coins, _ = self._keys.shape
        keys, flips = _derive_keys(seed, steps, n_coins - 1)
        self._keys.copy_(keys)
        self._flips.copy_(flips)

    def draw(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the bits of a step: (1, elements) of ties and (workers, elements) of zeros, bool."""
        keys, flips = self._keys[step][0], self._flips[step][0]
        octets = (mix_words(self._strides + keys) ^ flips).view(torch.uint8)
        bits = ((octets.unsqueeze(-1) >> self._places) & 1).flatten(1).bool()
        return bits[:1], bits[1:]


@cache
def _derive_keys(seed: int, steps: int, workers: int) -> Tensor:
    """Return the key of each coin of each step, and what its bits are flipped by."""
    found = torch.zeros(2, steps, 1 + workers, 1, dtype=torch.int64)
    for step in range(steps):
        drawn = [Coins(seed, step, voter) for voter in range(workers)]
        for place, coin in enumerate([drawn[0].tie, *(coins.zero for coins in drawn)]):
            found[0, step, place] = signed(coin.key)
            found[1, step, place] = -1 if coin.inverted else 0
    return found


class ParameterMeans:
    """Means over each parameter, by the tree of ``reference.Kernels.encode_rests``.

    Args:
        layout: Of the row.
        device: Of the rows.

    Attributes:
        counts: (parameters,) float64, the number of elements of each.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        n_blocks = [-(-size // SCALE_BLOCK_ELEMENTS) for size in layout.sizes]
        # Places of the elements of each block, and of the blocks of each parameter; the number
        # behind the last one stands for 0.
        elements = torch.full((sum(n_blocks), SCALE_BLOCK_ELEMENTS), layout.length)
        blocks = torch.full((len(n_blocks), _round_up(max(n_blocks))), sum(n_blocks))
        owners = torch.zeros(layout.length, dtype=torch.int64)
        first = 0
        for index, (begin, size, count) in enumerate(
            zip(layout.begins, layout.sizes, n_blocks, strict=True)
        ):
            own = elements[first : first + count].view(-1)
            own[:size] = torch.arange(begin, begin + size)
            blocks[index, :count] = torch.arange(first, first + count)
            owners[begin : begin + count_words(size) * WORD_ELEMENTS] = index
            first += count
        self._elements, self._blocks = elements.to(device), blocks.to(device)
        self._owners = owners.to(device)
        self.counts = torch.tensor(layout.sizes, dtype=torch.float64, device=device)

    def add_up(self, rows: Tensor) -> Tensor:
        """Sum rows (workers, elements) over each parameter: (workers, parameters) float64."""
        sums = rows.double()
        for places in (self._elements, self._blocks):
            sums = torch.cat([sums, sums.new_zeros(len(sums), 1)], 1)[:, places]
            while sums.shape[-1] > 1:
                half = sums.shape[-1] // 2
                sums = sums[..., :half] + sums[..., half:]
            sums = sums[..., 0]
        return sums

    def spread(self, means: Tensor) -> Tensor:
        """Return for each element the value of its parameter, (workers, elements)."""
        return means[:, self._owners]


def _round_up(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()

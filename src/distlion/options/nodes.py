"""Nodes: ranks that share fast links act as one worker, each for its piece of every parameter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels import SCALE_BLOCK_ELEMENTS
from distlion.layout import Slot
from distlion.step import ALONE, Copies

PIECE_UNIT_ELEMENTS = SCALE_BLOCK_ELEMENTS
"""Pieces begin where the scale blocks of QuantizedVote do, so that none is cut."""


@dataclass(frozen=True)
class Nodes:
    """Let the ranks of a node act as one worker: only votes of whole nodes cross the network.

    Equation:
        g = (g_0 + ... + g_(L-1)) / L, added in float32 in local-rank order; 0 where a rank has no
        gradient. Votes, ties and rules are then those of N / L workers with these gradients; the
        scales of ``FeedbackVote`` are those of each rank's piece.

    Args:
        size: L, ranks of a node; None takes LOCAL_WORLD_SIZE, which torchrun sets. Ranks of a node
            follow each other: 0 ... L - 1, L ... 2 L - 1, and so on.

    Raises:
        InvalidArgumentError: ``size`` is below 1.
        UnsupportedTypeError: ``size`` is not an integer.

    Notes:
        Each rank keeps the momentum of, and votes for, its part of every parameter only, so that
        ``exp_avg`` in the optimizer's state, and ``estimate``, are flat and hold 1/L of it.
    """

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is None:
            return
        if not isinstance(self.size, int) or isinstance(self.size, bool):
            raise UnsupportedTypeError(f"Nodes(size={self.size!r}): expected an integer or None")
        if self.size < 1:
            raise InvalidArgumentError(f"Nodes(size={self.size}): expected 1 or more")

    def resolve(self, world_size: int) -> int:
        """Return the ranks of a node.

        Raises:
            InvalidArgumentError: It is not known, or the workers are no multiple of it.
        """
        size = self.size
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            if not text.isdecimal() or int(text) < 1:
                raise InvalidArgumentError(
                    f"Nodes() takes its size from LOCAL_WORLD_SIZE, which is {text!r}; start the "
                    "workers with torchrun, or give Nodes(size=...)"
                )
            size = int(text)
        if world_size % size:
            raise InvalidArgumentError(
                f"{world_size} workers cannot be cut into nodes of {size}; expected a multiple"
            )
        return size


class NodePieces:
    """The pieces of every parameter that the ranks of a node keep the momentum of.

    A parameter's pieces depend on it and on those before it only, so that a further param group
    moves no momentum. Without nodes there is one piece, the whole.

    Args:
        size: Ranks of a node.
        part: Number of this rank in its node.
    """

    def __init__(self, size: int, part: int) -> None:
        self.part = part
        self._size = size
        self._cutter = Cutter(size, PIECE_UNIT_ELEMENTS)
        self._pieces: dict[Tensor, tuple[tuple[int, int], ...]] = {}

    def cut(self, param: Tensor) -> None:
        """Cut one more parameter, unless it is cut already."""
        if self._size > 1 and param not in self._pieces:
            self._pieces[param] = self._cutter.cut(param.numel())

    def forget(self, params: Iterable[Tensor]) -> None:
        """Go back to before these, the last ones, were cut: what is cut next depends on it."""
        for param in params:
            self._pieces.pop(param, None)
        self._cutter = Cutter(self._size, PIECE_UNIT_ELEMENTS)
        for param in self._pieces:
            self._cutter.cut(param.numel())

    def of(self, param: Tensor) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of each rank's piece, of the flat parameter."""
        return self._pieces.get(param, ((0, param.numel()),))

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the place of what a bucket has of a parameter: all of it."""
        return slot

    def find_copies(self, param: Tensor) -> Copies:
        """Return that each piece is held once."""
        return ALONE

    def momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the parameter's shape; with nodes, that of this rank's flat piece of it."""
        if param not in self._pieces:
            return param.shape
        start, stop = self._pieces[param][self.part]
        return torch.Size([stop - start])

    def take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return what is kept here of a saved momentum: with nodes, a piece of a whole one."""
        if exp_avg.shape == self.momentum_shape(param):
            return exp_avg
        start, stop = self._pieces[param][self.part]
        return exp_avg.reshape(-1)[start:stop]

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Return a saved momentum as it is."""
        return exp_avg

    def sketch(self, param: Tensor, exp_avg: Any) -> Any:
        """Return what ``localize`` does, which asks nobody."""
        return exp_avg

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Return that ``localize`` asks nobody."""
        return ""

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum as it is saved: as it is."""
        return exp_avg


class Cutter:
    """Cut parameters, one after the other, into one piece for each part, of about equal size.

    A parameter's pieces depend only on it and on the parameters cut before it. Parts take turns at
    the larger pieces.

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

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
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS
from distlion.layout import Slot
from distlion.step.param import ALONE, Copies

PIECE_UNIT_ELEMENTS = SCALE_BLOCK_ELEMENTS
"""Unit of the start of pieces: a scale block of QuantizedVote, so that none is cut."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Let the ranks of a node act as one worker: only votes of whole nodes cross the network.

    Equation:
        g = (g_0 + ... + g_(L-1)) / L, added in float32 in local-rank order; 0 where a rank has no
        gradient. Votes, ties and rules are then as with N / L workers that have these gradients;
        ``FeedbackVote`` has scales for each rank's piece.

    Args:
        ranks_per_node: L; None takes LOCAL_WORLD_SIZE, which torchrun sets. Ranks of a node follow
            each other: 0 ... L - 1, L ... 2 L - 1, and so on.

    Raises:
        InvalidArgumentError: ``ranks_per_node`` is below 1.
        UnsupportedTypeError: ``ranks_per_node`` is not an integer.

    Notes:
        Each rank votes for its part of every parameter only, and keeps that part's momentum. So
        ``exp_avg`` and ``estimate`` in the optimizer's state are flat and hold 1/L of it.
    """

    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        given = self.ranks_per_node
        if given is None:
            return
        if not isinstance(given, int) or isinstance(given, bool):
            raise UnsupportedTypeError(
                f"Nodes(ranks_per_node={given!r}): expected an integer or None"
            )
        if given < 1:
            raise InvalidArgumentError(f"Nodes(ranks_per_node={given}): expected 1 or more")

    def resolve(self, world_size: int) -> int:
        """Return the number of ranks of a node.

        Raises:
            InvalidArgumentError: It is not known, or the number of workers is not a multiple.
        """
        size = self.ranks_per_node
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            if not text.isdecimal() or int(text) < 1:
                raise InvalidArgumentError(
                    f"Nodes() takes its size from LOCAL_WORLD_SIZE, which is {text!r}; start the "
                    "workers with torchrun, or give Nodes(ranks_per_node=...)"
                )
            size = int(text)
        if world_size % size:
            raise InvalidArgumentError(
                f"{world_size} workers cannot be cut into nodes of {size}; expected a multiple"
            )
        return size


class NodePieces:
    """The division of every parameter into pieces, each with its momentum on one rank of a node.

    A parameter's pieces depend only on it and on earlier parameters, so that adding a param group
    moves no momentum. Without nodes there is one piece, the whole.

    Args:
        size: Ranks of a node.
        part: Number of this rank in its node.
    """

    makes_whole = False
    """False, as no parameter is a DTensor; pieces of a node are made whole in its route."""

    def __init__(self, size: int, part: int) -> None:
        self.part = part
        self._size = size
        self._cutter = Cutter(size, PIECE_UNIT_ELEMENTS)
        self._pieces: dict[Tensor, tuple[tuple[int, int], ...]] = {}

    def cut(self, param: Tensor) -> None:
        """Cut another parameter, unless it is cut already."""
        if self._size > 1 and param not in self._pieces:
            self._pieces[param] = self._cutter.cut(param.numel())

    def forget(self, params: Iterable[Tensor]) -> None:
        """Undo the cuts of these last parameters, on which later cuts depend."""
        for param in params:
            self._pieces.pop(param, None)
        self._cutter = Cutter(self._size, PIECE_UNIT_ELEMENTS)
        for param in self._pieces:
            self._cutter.cut(param.numel())

    def of(self, param: Tensor) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of each rank's piece of the flat parameter."""
        return self._pieces.get(param, ((0, param.numel()),))

    def place(self, slot: Slot, param: Tensor) -> Slot:
        """Return the slot of a parameter unchanged, as a bucket has all of it."""
        return slot

    def find_copies(self, param: Tensor) -> Copies:
        """Return ``ALONE``, as each piece is held once."""
        return ALONE

    def momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the parameter's shape, or with nodes the shape of this rank's flat piece."""
        if param not in self._pieces:
            return param.shape
        start, stop = self._pieces[param][self.part]
        return torch.Size([stop - start])

    def take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a saved momentum, or with nodes this rank's piece of it."""
        if exp_avg.shape == self.momentum_shape(param):
            return exp_avg
        start, stop = self._pieces[param][self.part]
        return exp_avg.reshape(-1)[start:stop]

    def localize(self, param: Tensor, exp_avg: Any) -> Any:
        """Return a saved momentum unchanged."""
        return exp_avg

    def sketch(self, param: Tensor, exp_avg: Any) -> Any:
        """Return the same as ``localize``, which asks no other rank."""
        return exp_avg

    def describe_cut(self, param: Tensor, exp_avg: Any) -> str:
        """Return "", as ``localize`` asks no other rank."""
        return ""

    def export(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return a momentum unchanged, which is its saved form."""
        return exp_avg


class Cutter:
    """Cut parameters, one after the other, into one piece for each part, of about equal size.

    A parameter's pieces depend only on it and on the parameters cut before it. Parts take turns to
    get the larger pieces.

    Args:
        n_parts: Number of parts.
        unit_elements: Unit of the start of pieces; a multiple of 64.
    """

    def __init__(self, n_parts: int, unit_elements: int) -> None:
        self._n_parts = n_parts
        self._unit_elements = unit_elements
        self._turn = 0

    def cut(self, n_elements: int) -> tuple[tuple[int, int], ...]:
        """Cut the next parameter; return (start, stop) of each part, some of which may be empty."""
        least, more = divmod(-(-n_elements // self._unit_elements), self._n_parts)
        units = [
            least + ((part - self._turn) % self._n_parts < more) for part in range(self._n_parts)
        ]
        self._turn = (self._turn + more) % self._n_parts
        ends = itertools.accumulate(units, initial=0)
        return tuple(itertools.pairwise(min(n_elements, end * self._unit_elements) for end in ends))

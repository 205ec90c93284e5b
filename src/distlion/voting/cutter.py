"""Which piece of every parameter a rank of a node has."""

from __future__ import annotations

import itertools


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

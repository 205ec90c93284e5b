"""Several exchanges under way at once, so that the network has work while a rank computes."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")
Exchanging = Generator[None, None, T]
"""An exchange, which yields once its bytes are under way, and returns what came back."""


def run_all(exchanges: Iterable[Exchanging[T]]) -> list[T]:
    """Run exchanges through one pipeline; each is made when it is its turn to start."""
    pipeline = Pipeline[T]()
    for exchanging in exchanges:
        pipeline.add(exchanging)
    return pipeline.drain()


class Pipeline(Generic[T]):
    """Exchanges that take turns, in an order that depends on nothing but their order.

    Each new one sends before the earlier ones wait, and each of these goes one round further:

        votes of bucket 1 | votes of 2, replies of 1 | votes of 3, replies of 2 | replies of 3

    So all ranks begin the same collectives in the same order, as long as all add the same buckets.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[int, Exchanging[T]]] = []
        self._results: dict[int, T] = {}
        self._n_added = 0

    def add(self, exchanging: Exchanging[T]) -> None:
        """Start an exchange, then take each earlier one a round further.

        Raises:
            DistlionError: Whatever one of them raises; then the pipeline is of no more use.
        """
        entry = (self._n_added, exchanging)
        self._n_added += 1
        earlier, self._under_way = self._under_way, []
        self._advance([entry, *earlier])
        # The oldest first, in the next turn too.
        self._under_way.sort(key=itemgetter(0))

    def drain(self) -> list[T]:
        """Bring all to their end, and return what they returned, in the order of ``add``."""
        while self._under_way:
            waiting, self._under_way = self._under_way, []
            self._advance(waiting)
        return list(map(self._results.__getitem__, range(self._n_added)))

    def _advance(self, entries: list[tuple[int, Exchanging[T]]]) -> None:
        for number, exchanging in entries:
            try:
                next(exchanging)
            except StopIteration as end:
                self._results[number] = end.value
            else:
                self._under_way.append((number, exchanging))

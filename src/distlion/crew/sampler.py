"""Examples for each member of a crew: none is used twice, and none left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distlion.numpy_numbers import as_python
from distlion.step.arguments import check_count

if TYPE_CHECKING:
    from distlion.crew.crew import Crew


class CrewSampler:
    """Deal out examples to the present members of a crew.

    All members share one cursor in one order of the examples. In a step worker ``place`` of
    ``size`` takes the ``place``-th ``batch_size`` of them; ``advance`` moves the cursor by ``size *
    batch_size``. After a change, members take the examples of an uncommitted step again, at their
    new places: no example of a pass over the data is seen twice or left out. The last step of a
    pass continues with the first examples of the next one.

    Args:
        crew: The members.
        n_examples: Examples in all.
        batch_size: Examples of each worker in a step; of each process, if a worker has several.
        seed: Seed of the order.
        name: Unique name by which the crew carries the sampler.

    Attributes:
        cursor: Examples dealt out so far.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A number is below 1, or not an integer.
    """

    def __init__(
        self, crew: Crew, n_examples: int, batch_size: int, *, seed: int = 0, name: str = "sampler"
    ) -> None:
        # Shapes and sums of numpy are numbers of its own.
        n_examples, batch_size = as_python(n_examples), as_python(batch_size)
        check_count("n_examples", n_examples)
        check_count("batch_size", batch_size)
        self._crew, self._n_examples, self._batch_size = crew, n_examples, batch_size
        self._seed, self.cursor = seed, 0
        self._order: tuple[int, torch.Tensor] | None = None
        crew.carry(**{name: self})

    def take(self) -> list[int]:
        """Let newcomers in, then return the numbers of this worker's examples for the next step.

        See ``Crew.admit``: schedulers move on before, and calls that need every member come after.
        All processes of all members call it, or none.

        Raises:
            CrewError: Too few workers are left, or the store is gone.
            StepError: Settings, steps or parameters of members differ.
        """
        self._crew.admit()
        place = self._crew.rank * self._crew.n_lanes + self._crew.lane
        first = self.cursor + place * self._batch_size
        return [self._find(first + offset) for offset in range(self._batch_size)]

    def advance(self) -> None:
        """Note that a step was committed, or skipped by all."""
        self.cursor += self._crew.size * self._crew.n_lanes * self._batch_size

    def _find(self, position: int) -> int:
        time_through, place = divmod(position, self._n_examples)
        if self._order is None or self._order[0] != time_through:
            generator = torch.Generator().manual_seed(self._seed + time_through)
            self._order = (
                time_through,
                torch.randperm(self._n_examples, generator=generator, device="cpu"),
            )
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a cursor."""
        self.cursor = int(state_dict["cursor"])

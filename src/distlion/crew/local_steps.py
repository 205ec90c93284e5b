"""Local steps of a crew: workers are lost, return and join while local steps go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from distlion.crew.local_votes import CrewVotes
from distlion.crew.membership import Membership
from distlion.crew.optimizer import CrewLion
from distlion.local.local_steps import Inner, LocalSteps
from distlion.step.stage import Stage


class CrewLocalSteps(LocalSteps):
    """A ``LocalSteps`` whose workers may change at a vote; ``Crew.local_steps`` makes it.

    A newcomer's first ``step()`` is the one in which the others have let it in. It abstains from
    their vote, ignores its gradient, and returns None. ``step()`` and ``vote()`` also raise
    CrewError if too few workers are left or the store is gone. Without a step since the last vote,
    ``vote()`` meets nobody, so that it lets no newcomer in.

    Args:
        membership: This worker's membership in the crew.
        inner: As for ``LocalSteps``.
        buffers: Tensors that a newcomer takes from the most advanced worker.
        **options: As for ``LocalSteps``.
    """

    _votes: CrewVotes

    def __init__(
        self,
        membership: Membership,
        inner: Inner,
        *,
        buffers: Iterable[Tensor] = (),
        **options: Any,
    ) -> None:
        # Not an attribute: a load that fails restores everything reachable from attributes.
        def make(stages: Sequence[Stage], *args: Any, **options: Any) -> CrewLion:
            return CrewLion.with_stages(stages, membership, *args, buffers=buffers, **options)

        self._open_votes = partial(CrewVotes, make)  # type: ignore[method-assign]
        super().__init__(inner, **options)

    @property
    def point(self) -> CrewLion:
        """The optimizer of the common point, formed anew in place when members change."""
        assert isinstance(self._votes.common, CrewLion)
        return self._votes.common

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        while at := self._votes.at:
            self._votes.join()
            if at == "step":
                return None
        return super()._take_step(closure)

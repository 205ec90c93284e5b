"""Steps that are tried again where members change, for loops that ignore their outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distlion.crew.optimizer import CrewLion
from distlion.errors import InvalidArgumentError


class RetryingLion(CrewLion):
    """A ``CrewLion`` whose ``step()`` returns only once the step is done.

    A call votes again with the gradients that are there. A worker that took later parameters from
    the others meanwhile votes on their next step, by gradients of its earlier parameters. So each
    call commits or skips one step, and the caller's scheduler stays in step with the others.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Do one step, whatever members change meanwhile.

        Args:
            closure: Re-evaluates the model; run once. It may add to gradients of micro-batches.

        Returns:
            True.

        Raises:
            CrewError: Too few workers are left, or the store is gone.
            StepError: As ``DistributedLion``, for errors that do not concern members.
        """
        left = [] if closure is None else [closure]

        def run_once() -> Any:
            return left.pop()()

        while not super().step(run_once if left else None):
            pass
        return True

    def carries(self, each: object) -> bool:
        """Return whether a newcomer takes the state of this object."""
        return self._membership.carried.has(each)


def check_retry(retry: bool, options: Mapping[str, Any]) -> None:
    """Refuse to try again what needs a new backward pass.

    Raises:
        InvalidArgumentError: Votes leave in the backward pass.
    """
    if retry and options.get("overlap"):
        raise InvalidArgumentError(
            f"retry=True cannot be used with overlap={options['overlap']!r}: votes leave in the "
            "backward pass, so that they cannot be cast again without another one"
        )

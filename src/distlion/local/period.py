"""The present period of local steps: its length, and changes made outside of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.local.write_check import WriteCheck, list_moved


class LocalPeriod:
    """Count local steps, and find changes to parameters that no local step made.

    Attributes:
        calls: Calls of ``step()`` so far.
        since: Calls since the last vote that was committed or given up by all.
    """

    def __init__(self) -> None:
        self.calls = self.since = 0
        self._trained: dict[Tensor, bool] = {}
        self._names: dict[Tensor, str] = {}
        self._checks: list[WriteCheck] = []  # of different parameters
        self._loaded: list[tuple[Tensor, Tensor]] = []
        self._written: str | None = None

    def know(self, names: Mapping[Tensor, str]) -> None:
        """Note the parameters that votes cover, and whether they are trained."""
        self._names |= names
        self._trained |= {param: param.requires_grad for param in names}

    def count(self) -> None:
        """Count a call of ``step()``."""
        self.calls += 1
        self.since += 1

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note that all parameters are at their values in ``pairs`` now; forget earlier writes.

        Args:
            pairs: Each with its common point, or another tensor that keeps its value.
        """
        self._checks, self._loaded, self._written = [], [], None
        self.take_added(pairs)

    def take_added(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note the values of parameters that were added."""
        self._checks.append(WriteCheck(*([pair[place] for pair in pairs] for place in (0, 1))))

    def set_progress(
        self, calls: int, since: int, pairs: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Continue from a loaded state; parameters may be loaded before or after it.

        Args:
            calls: As the attribute.
            since: As the attribute.
            pairs: Parameters that have to be at their common points before the first step of a
                period, each with it.
        """
        self.calls, self.since = calls, since
        self._checks, self._loaded, self._written = [], [] if since else list(pairs), None

    def check_begin(self) -> None:
        """Compare parameters with the period's start, before its first step moves them."""
        checks, self._checks = self._checks, []
        pairs, self._loaded = self._loaded, []
        written = [each for check in checks for each in check.list_written()]
        for param in (*written, *list_moved(pairs)):
            self._written = self._written or self._names[param]

    def find_problem(self, groups: Sequence[Mapping[str, Any]]) -> InvalidArgumentError | None:
        """Return the reason why this worker cannot vote; None if it can.

        Args:
            groups: The inner optimizer's param groups.
        """
        if self._written is not None:
            return InvalidArgumentError(
                f"{self._written} was written to between two periods, so that its delta would hold "
                "more than local steps. Expected the values of the common point, or those that its "
                "state was loaded with. Load weights before LocalSteps is made, or before you load "
                "its state. Let a forward pass write to no parameter, except to shorten rows, as "
                "nn.Embedding(max_norm=) does"
            )
        present = [param for group in groups for param in group["params"]]
        for param in present:
            if param not in self._trained:
                return InvalidArgumentError(
                    f"a parameter of shape {tuple(param.shape)} is in the inner optimizer alone, "
                    "so that votes leave it out. Add it by add_param_group of LocalSteps"
                )
        held = set(present)
        for param, was_trained in self._trained.items():
            if param not in held:
                return InvalidArgumentError(
                    f"{self._names[param]} is no longer in the inner optimizer. Expected the "
                    "parameters from the start. Make a new optimizer on all workers"
                )
            if param.requires_grad != was_trained:
                then, now = ("trained", "frozen") if was_trained else ("frozen", "trained")
                return InvalidArgumentError(
                    f"{self._names[param]} was {then} when LocalSteps was made, and is {now}. "
                    "Expected no change. Make a new optimizer on all workers"
                )
        return None

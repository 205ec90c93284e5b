"""The present period of local steps: its length, and changes made outside of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.local.write_check import WriteCheck


class LocalPeriod:
    """Count local steps, and find changes to parameters that no local step made.

    Args:
        n_parts: Parts of the parameters that take turns to vote.

    Attributes:
        calls: Calls of ``step()`` so far.
        since: For each part, calls since its last vote that was committed or given up by all.
    """

    def __init__(self, n_parts: int) -> None:
        self.calls, self.since = 0, [0] * n_parts
        self._trained: dict[Tensor, bool] = {}
        self._names: dict[Tensor, str] = {}
        self._begun: dict[Tensor, WriteCheck] = {}
        self._written: str | None = None

    def know(self, names: Mapping[Tensor, str]) -> None:
        """Note the parameters that votes cover, and whether they are trained."""
        self._names |= names
        self._trained |= {param: param.requires_grad for param in names}

    def count(self) -> None:
        """Count a call of ``step()``."""
        self.calls += 1
        self.since = [steps + 1 for steps in self.since]

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note that parameters are at the common point now; forget earlier writes to any.

        Args:
            pairs: Each with its common point.
        """
        self._written = None
        self.note_common(pairs)

    def note_common(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note that parameters are at the common point now."""
        params = [param for param, _ in pairs]
        self._begun |= dict.fromkeys(params, WriteCheck(params, [start for _, start in pairs]))

    def note_begun(self, params: Sequence[Tensor], begun: Sequence[Tensor]) -> None:
        """Note the parameters' values at the start of a vote that travels."""
        self._begun = dict.fromkeys(params, WriteCheck(params, begun))

    def set_progress(self, calls: int, since: Sequence[int]) -> None:
        """Continue from a loaded state; parameters may be loaded before or after it."""
        self.calls, self.since = calls, list(since)
        self._begun, self._written = {}, None

    def check_begin(self) -> None:
        """Compare parameters with the period's start, before its first step moves them."""
        begun, self._begun = self._begun, {}
        for start in dict.fromkeys(begun.values()):
            written = [param for param in start.list_written() if begun[param] is start]
            if written:
                self._written = self._written or self._names[written[0]]

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

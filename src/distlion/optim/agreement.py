"""What must be equal on all workers, in words: lines to compare, and to tell a difference by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.optim.replicas import digest_lines
from distlion.optim.settings import describe_hyperparameters


class Agreement:
    """Describe one optimizer to its peers, and notice parameters thawed behind its back.

    Args:
        lines: What does not change from step to step.
        names: Of all parameters, frozen ones too.
    """

    def __init__(self, lines: Sequence[str], names: Mapping[Tensor, str]) -> None:
        self.fixed_lines = list(lines)
        self._digest = digest_lines(self.fixed_lines).hex()
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}

    def describe(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describe all that must be equal in this step, given the present param groups."""
        return self.fixed_lines + self._describe_step(groups)

    def describe_briefly(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return fewer lines that differ where those of ``describe`` do."""
        return [self._digest, *self._describe_step(groups)]

    def _describe_step(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        thawed = [f"no longer frozen: {name}" for name in self._thawed()]
        return describe_hyperparameters(groups) + thawed

    def check_frozen(self) -> None:
        """Check that what was frozen still is.

        Raises:
            InvalidArgumentError: A parameter was thawed; on all workers alike, since their
                descriptions would differ otherwise.
        """
        for name in self._thawed():
            raise InvalidArgumentError(
                f"{name} was frozen when this optimizer was made and requires a gradient now; "
                "make a new optimizer on all workers and load the state into it"
            )

    def _thawed(self) -> list[str]:
        return [name for param, name in self._frozen.items() if param.requires_grad]

"""One optimizer in words: lines that must be equal on all workers, and tell what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.voting.replicas import digest_lines
from distlion.voting.settings import describe_hyperparameters


class Description:
    """Describe an optimizer to its peers, and notice parameters thawed behind its back.

    Args:
        lines: What does not change from step to step.
        names: Of all parameters, frozen ones too.
    """

    def __init__(self, lines: Sequence[str], names: Mapping[Tensor, str]) -> None:
        self._lines = list(lines)
        self._digest = digest_lines(self._lines).hex()
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}

    def tell(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describe all that must be equal in a step with these param groups."""
        return self._lines + describe_hyperparameters(groups) + self.tell_thawed()

    def tell_briefly(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return fewer lines, which differ where those of ``tell`` do."""
        return [self._digest, *describe_hyperparameters(groups), *self.tell_thawed()]

    def tell_thawed(self) -> list[str]:
        """One line for each parameter that was frozen and is not."""
        return [f"no longer frozen: {name}" for name in self._thawed()]

    def check_frozen(self) -> None:
        """Check that what was frozen still is.

        Raises:
            InvalidArgumentError: A parameter was thawed; on all workers alike, since their
                descriptions would differ otherwise.
        """
        if thawed := self._thawed():
            raise InvalidArgumentError(
                f"{thawed[0]} was frozen when this optimizer was made and requires a gradient now; "
                "make a new optimizer on all workers and load the state into it"
            )

    def _thawed(self) -> list[str]:
        return [name for param, name in self._frozen.items() if param.requires_grad]

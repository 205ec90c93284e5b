"""The part of a member's local steps that a crew carries from member to member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from distlion.crew.epoch import Epoch


class LocalSide(Protocol):
    """The part of a member's local steps that a crew carries from member to member."""

    @property
    def n_calls(self) -> int:
        """Number of this worker's local steps."""
        ...

    def list_buffers(self) -> list[Tensor]:
        """List the tensors that a lagging worker takes from the first one."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the state, apart from tensors, that the first worker gives lagging workers."""
        ...

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuse a description that does not fit; nothing was taken."""
        ...

    def take(self, epoch: Epoch, given: Mapping[str, Any]) -> None:
        """Keep the state that a lagging worker was given; tensors are in place."""
        ...

    def take_donor_groups(self) -> None:
        """Restore the hyperparameters that this worker was given when it joined."""
        ...

    def catch_up(self) -> None:
        """Join the others' current call, if this worker came in the middle of one."""
        ...

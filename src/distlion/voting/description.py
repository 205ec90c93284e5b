"""One optimizer in words: lines that must be equal on all workers, and name what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.voting.fixed_groups import FixedGroups
from distlion.voting.hyperparameters import describe_hyperparameters
from distlion.voting.make import describe_make
from distlion.voting.param import VotingParam, is_dtensor


def digest_lines(lines: Sequence[str]) -> bytes:
    """Digest a description: 32 bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def digest_settings(lines: Sequence[str]) -> int:
    """Digest a description for a header: unsigned 64 bits."""
    return int.from_bytes(digest_lines(lines)[:8], "little")


def describe_params(groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[str]:
    """One line for each parameter.

    Devices are numbered: a worker may have a GPU and another none, but those that share a device,
    and with it a bucket, must be the same everywhere.
    """
    lines, devices = [], list(dict.fromkeys(param.device for param in names))
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            trained = "trained" if param.requires_grad else "frozen"
            place = f"device {devices.index(param.device)}"
            kind = f"{tuple(param.shape)}, {param.dtype}, {place}, {trained}"
            if is_dtensor(param):
                kind += f", {param.placements}"
            lines.append(f"parameter {index} of group {number}: {names[param]}, {kind}")
    return lines


class Description:
    """Describe an optimizer to its peers, and notice what is changed behind its back.

    That is requires_grad toggled, parameters in its groups replaced by others, cast or resized.

    Args:
        lines: What does not change from step to step.
        names: Of all parameters, frozen ones too.
        fixed: What its param groups held.
        params: The trainable parameters.
    """

    def __init__(
        self,
        lines: Sequence[str],
        names: Mapping[Tensor, str],
        fixed: FixedGroups,
        params: Sequence[VotingParam] = (),
    ) -> None:
        self._fixed, self._params = fixed, params
        self._lines = list(lines)
        self._digest = digest_lines(self._lines).hex()
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}
        self._trained = {param: name for param, name in names.items() if param.requires_grad}

    def list_lines(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describe all that must be equal in a step with these param groups."""
        lines = self._lines + describe_hyperparameters(groups) + self.list_toggled(groups)
        return lines + self._list_recast()

    def digest(self, groups: Sequence[Mapping[str, Any]], changing: Sequence[str]) -> int:
        """Digest what ``list_lines`` says, for the headers of a step: unsigned 64 bits.

        Args:
            groups: The param groups.
            changing: The hyperparameters, as ``describe_hyperparameters`` returns them.
        """
        return digest_settings([self._digest, *changing, *self.list_toggled(groups)])

    def list_toggled(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """One line for each parameter that was frozen and is not, or the other way round."""
        lines = []
        for param, name in self._frozen.items():
            if param.requires_grad:
                lines.append(f"no longer frozen: {name}")
        for param, name in self._trained.items():
            if not param.requires_grad:
                lines.append(f"no longer trained: {name}")
        return lines + self._fixed.list_changed(groups)

    def _list_recast(self) -> list[str]:
        """One line for each parameter that is of another make now: cast, moved or resized."""
        return [
            f"since this optimizer was made {param.name} became: {describe_make(param.param)}"
            for param in self._params
            if not param.make.fits(param.param)
        ]

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that nothing of it was changed that buckets and momenta were laid out by.

        Only trainable parameters have momentum and a place in a bucket, agreed between workers.

        Raises:
            InvalidArgumentError: A parameter was unfrozen, replaced, cast or resized, or a group
                says otherwise what it says once.
        """
        try:
            self._fixed.check(groups)
            for trained in self._params:
                trained.check_make()
            for param, name in self._frozen.items():
                if param.requires_grad:
                    raise InvalidArgumentError(
                        f"{name} was frozen when this optimizer was made and requires a gradient "
                        "now; make a new optimizer on all workers and load the state into it"
                    )
        except InvalidArgumentError as error:
            error.is_recoverable = True
            raise

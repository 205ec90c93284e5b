"""One optimizer in words: lines that must be equal on all workers, and name what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.voting.hyperparameters import describe_hyperparameters
from distlion.voting.param import is_dtensor


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

    That is requires_grad toggled, and parameters in its groups replaced by others.

    Args:
        lines: What does not change from step to step.
        names: Of all parameters, frozen ones too.
        groups: Its param groups, looked at again in every step.
    """

    def __init__(
        self,
        lines: Sequence[str],
        names: Mapping[Tensor, str],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._groups = groups
        self._held = [list(group["params"]) for group in groups]
        self._lines = list(lines)
        self._digest = digest_lines(self._lines).hex()
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}
        self._trained = {param: name for param, name in names.items() if param.requires_grad}

    def list_lines(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describe all that must be equal in a step with these param groups."""
        return self._lines + describe_hyperparameters(groups) + self.list_toggled()

    def digest(self, changing: Sequence[str]) -> int:
        """Digest what ``list_lines`` says, for the headers of a step: unsigned 64 bits.

        Args:
            changing: The hyperparameters, as ``describe_hyperparameters`` returns them.
        """
        return digest_settings([self._digest, *changing, *self.list_toggled()])

    def list_toggled(self) -> list[str]:
        """One line for each parameter that was frozen and is not, or the other way round."""
        lines = []
        for param, name in self._frozen.items():
            if param.requires_grad:
                lines.append(f"no longer frozen: {name}")
        for param, name in self._trained.items():
            if not param.requires_grad:
                lines.append(f"no longer trained: {name}")
        return lines + self._list_replaced()

    def _list_replaced(self) -> list[str]:
        """One line for each param group that holds other parameters now."""
        lines = []
        for number, held in enumerate(self._held):
            params = self._groups[number]["params"] if number < len(self._groups) else []
            # By identity: tensors compare their elements.
            if list(map(id, params)) != list(map(id, held)):
                lines.append(f"replaced since this optimizer was made: params of group {number}")
        return lines

    def _check_held(self) -> None:
        """Check that the param groups hold the parameters that they held before.

        Raises:
            InvalidArgumentError: They hold others, which have no momentum; on all workers alike,
                since their descriptions would differ otherwise.
        """
        replaced = self._list_replaced()
        if replaced:
            error = InvalidArgumentError(
                f"{replaced[0]}; a step would move tensors that the model may not use any more. "
                "Make the optimizer after the model is wrapped, sharded or moved, use "
                "add_param_group() for more parameters, and load_state_dict() for momenta"
            )
            error.is_recoverable = True
            raise error

    def check_frozen(self) -> None:
        """Check that what was frozen still is, and that the parameters are the same.

        Only trainable parameters have momentum and a place in a bucket, agreed between workers.

        Raises:
            InvalidArgumentError: A parameter was unfrozen, or replaced; on all workers alike, since
                their descriptions would differ otherwise.
        """
        self._check_held()
        for param, name in self._frozen.items():
            if param.requires_grad:
                error = InvalidArgumentError(
                    f"{name} was frozen when this optimizer was made and requires a gradient now; "
                    "make a new optimizer on all workers and load the state into it"
                )
                error.is_recoverable = True
                raise error

"""The settings fingerprint of an optimizer: lines that must be equal on all ranks."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.step.hyperparameters import describe_hyperparameters, describe_steps
from distlion.step.param import VotingParam, describe_make, is_dtensor, is_wrapper


def digest_lines(lines: Sequence[str]) -> bytes:
    """Digest the lines of a fingerprint: 32 bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def digest_settings(lines: Sequence[str]) -> int:
    """Digest the lines of a fingerprint for a header: unsigned 64 bits."""
    return int.from_bytes(digest_lines(lines)[:8], "little")


def describe_params(groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[str]:
    """List a line for each parameter.

    Devices are numbered: one worker may have a GPU and another none, but the parameters that share
    a device, and so a bucket, must be the same everywhere.
    """
    lines, devices = [], list(dict.fromkeys(param.device for param in names))
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            trained = "trained" if param.requires_grad else "frozen"
            place = f"device {devices.index(param.device)}"
            kind = f"{tuple(param.shape)}, {param.dtype}, {place}, {trained}"
            if is_wrapper(param):
                kind += f", {type(param).__name__}"
            if is_dtensor(param):
                kind += f", {param.placements}"
            lines.append(f"parameter {index} of group {number}: {names[param]}, {kind}")
    return lines


READ_ONCE = ("aggregation", "orthogonalize", "param_names", "worker")
"""Keys that are fixed at construction, which lays out buckets, momenta and matrices by them."""


class FixedGroups:
    """Remember the groups and the state that an optimizer was laid out by, and detect changes.

    Steps would ignore a change but states would save it, so that a resumed run would differ from
    the saved one.

    Attributes:
        state: The optimizer's ``state`` then.
    """

    def __init__(self) -> None:
        self._held: list[list[Any]] = []
        self._said: list[dict[str, Any]] = []
        self.state: object = None

    def note(self, groups: Sequence[Mapping[str, Any]], state: object) -> None:
        """Remember what is to stay; call it after the optimizer changed it.

        Args:
            groups: The param groups, of which the contents are kept.
            state: The optimizer's ``state``, which the records of its parameters refer to.
        """
        self.state = state
        self._held = [list(group["params"]) for group in groups]
        self._said = [_copy_read_once(group) for group in groups]

    def is_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether ``list_changed`` would find nothing."""
        if len(groups) != len(self._held):
            return False
        for group, held, said in zip(groups, self._held, self._said, strict=True):
            params = group.get("params", ())
            if len(params) != len(held) or not all(map(operator.is_, params, held)):
                return False
            for key, before in said.items():
                now = group.get(key)
                if not (now is before or now == before):
                    return False
        return True

    def list_changed(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """List a line for each param group with other parameters, and each key of another value."""
        changed = [
            f"changed since this optimizer was made: {key} of group {number} to {now!r}"
            for number, key, now, _ in self._find_changed(groups)
        ]
        return self._list_replaced(groups) + changed

    def _list_replaced(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        lines = []
        for number in range(max(len(self._held), len(groups))):
            held = self._held[number] if number < len(self._held) else []
            params = groups[number].get("params", []) if number < len(groups) else []
            is_other = (number < len(self._held)) != (number < len(groups))
            is_other |= len(params) != len(held)
            # By identity: tensors compare their elements.
            if is_other or not all(map(operator.is_, params, held)):
                lines.append(f"replaced since this optimizer was made: params of group {number}")
        return lines

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that param groups are as they were when the optimizer was laid out.

        Raises:
            InvalidArgumentError: They hold other parameters, or a key that is read once differs.
        """
        replaced = self._list_replaced(groups)
        if replaced:
            raise InvalidArgumentError(
                f"{replaced[0]}; a step would move tensors that the model may not use any more. "
                "Make the optimizer after the model is wrapped, sharded or moved, use "
                "add_param_group() for more parameters, and load_state_dict() for momenta"
            )
        for number, key, now, before in self._find_changed(groups):
            raise InvalidArgumentError(
                f"{key} of group {number} is {now!r}, and was {before!r} when this optimizer was "
                "made, and is fixed since. Set it back, or make a new optimizer"
            )

    def refuse_replaced(self) -> InvalidArgumentError:
        """Return the error for a ``state`` that is not the one that steps use."""
        return InvalidArgumentError(
            "the state of this optimizer was replaced, and its momenta are in the former one. To "
            "reset momenta, keep optimizer.state and call zero_() of each 'exp_avg' in it, or make "
            "a new optimizer. For other momenta, call load_state_dict()"
        )

    def check_state(self, state: object) -> None:
        """Check that an optimizer's ``state`` is the one that its steps use.

        Raises:
            InvalidArgumentError: Another one was assigned.
        """
        if state is not self.state:
            raise self.refuse_replaced()

    def _find_changed(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield number, key, present and former value of changed keys that are read once."""
        for number, (group, said) in enumerate(zip(groups, self._said, strict=False)):
            for key, before in said.items():
                now = group.get(key)
                if now is not before and now != before:
                    yield number, key, now, before


def _copy_read_once(group: Mapping[str, Any]) -> dict[str, Any]:
    said = {}
    for key in READ_ONCE:
        value = group.get(key)
        said[key] = list(value) if isinstance(value, list) else value
    return said


def check_frozen(frozen: Mapping[Tensor, str], advice: str) -> None:
    """Check that parameters without a place in a bucket are still frozen.

    Args:
        frozen: The parameters and their names.
        advice: Advice for the message.

    Raises:
        InvalidArgumentError: One requires a gradient now.
    """
    for param, name in frozen.items():
        if param.requires_grad:
            raise InvalidArgumentError(
                f"{name} was frozen when this optimizer was made, or has replaced another "
                f"parameter, and requires a gradient now; {advice}"
            )


class Fingerprint:
    """Describe an optimizer to its peers, and detect changes made outside of it.

    Such changes toggle requires_grad, or replace, cast or resize parameters of its groups.

    Args:
        lines: Lines that do not change from step to step.
        names: Names of all parameters, including frozen ones.
        fixed: The contents of its param groups.
        params: The trainable parameters.

    Attributes:
        passing: Further lines that must be equal, as long as the caller sets them.
    """

    def __init__(
        self,
        lines: Sequence[str],
        names: Mapping[Tensor, str],
        fixed: FixedGroups,
        params: Sequence[VotingParam] = (),
    ) -> None:
        self._fixed, self._params = fixed, params
        self.passing: Sequence[str] = ()
        self._lines = list(lines)
        self._digest = digest_lines(self._lines).hex()
        self._digested: tuple[Sequence[str], int] = (), 0
        trained = {each.param for each in params}
        trained |= {param for param in names if param.requires_grad}
        self._frozen = {param: name for param, name in names.items() if param not in trained}
        self._trained = {param: name for param, name in names.items() if param in trained}

    @classmethod
    def of_nothing(cls) -> Fingerprint:
        """Return the fingerprint of an optimizer before its parameters are laid out."""
        return cls([], {}, FixedGroups())

    def list_lines(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describe all that must be equal in a step with these param groups."""
        lines = self._lines + describe_hyperparameters(groups) + describe_steps(groups)
        return [*lines, *self.list_toggled(groups), *self._list_recast(), *self.passing]

    def digest(self, changing: Sequence[str], toggled: Sequence[str]) -> int:
        """Digest the result of ``list_lines`` for the headers of a step: unsigned 64 bits.

        Args:
            changing: The hyperparameters, as ``describe_hyperparameters`` returns them; and the
                steps of groups, where they cannot be read.
            toggled: The result of ``list_toggled``.
        """
        if toggled or self.passing:
            return digest_settings([self._digest, *changing, *toggled, *self.passing])
        if changing is not self._digested[0]:
            self._digested = changing, digest_settings([self._digest, *changing])
        return self._digested[1]

    def list_toggled(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """List a line for each parameter that was frozen or unfrozen since."""
        if self._is_unchanged(groups):
            return []
        lines = []
        for param, name in self._frozen.items():
            if param.requires_grad:
                lines.append(f"no longer frozen: {name}")
        for param, name in self._trained.items():
            if not param.requires_grad:
                lines.append(f"no longer trained: {name}")
        return lines + self._fixed.list_changed(groups)

    def _is_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether ``list_toggled`` would find nothing, in one loop, as every step asks."""
        for param in self._frozen:
            if param.requires_grad:
                return False
        for param in self._trained:
            if not param.requires_grad:
                return False
        return self._fixed.is_unchanged(groups)

    def _list_recast(self) -> list[str]:
        """List a line for each parameter of another make now: cast, moved or resized."""
        return [
            f"since this optimizer was made {param.name} became: {describe_make(param.param)}"
            for param in self._params
            if not param.make.fits(param.param)
        ]

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that everything that determines buckets and momenta is unchanged.

        Raises:
            InvalidArgumentError: As ``check_groups``, or a parameter was cast, moved or resized; on
                all workers alike, since their descriptions would differ otherwise.
        """
        try:
            self.check_groups(groups)
            for param in self._params:
                param.check_make()
        except InvalidArgumentError as error:
            error.is_recoverable = True
            raise

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that param groups are unchanged, and that frozen parameters still are frozen.

        If ``list_toggled`` finds nothing, neither does this. Only trainable parameters have a
        momentum and a place in a bucket, on which workers agreed.

        Raises:
            InvalidArgumentError: A parameter was unfrozen or replaced, or a key has another value.
        """
        self._fixed.check(groups)
        check_frozen(self._frozen, "make a new optimizer on all workers and load the state into it")

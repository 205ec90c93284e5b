"""What param groups say once: read at construction, and refused where it has changed since."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distlion.errors import InvalidArgumentError

READ_ONCE = ("aggregation", "momentum_selected", "param_names", "worker")
"""Keys that no step reads: buckets, momenta and whose they are were settled by them."""


class FixedGroups:
    """Remember what an optimizer was laid out by, and notice what a user changed in place.

    A change would be ignored by steps and be saved all the same, so that a resumed run would not be
    the one that was saved.
    """

    def __init__(self) -> None:
        self._held: list[list[Any]] = []
        self._said: list[dict[str, Any]] = []

    def note(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Remember what param groups hold; call it whenever the optimizer itself changed them."""
        self._held = [list(group["params"]) for group in groups]
        self._said = [{key: _copy(group.get(key)) for key in READ_ONCE} for group in groups]

    def list_changed(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """One line for each param group with other parameters, and each key of another value."""
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
        """Check that param groups still say what the optimizer was laid out by.

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
                "made, which alone reads it. Set it back, or make a new optimizer"
            )

    def _find_changed(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield number, key, present and former value of what is read once and has changed."""
        for number, (group, said) in enumerate(zip(groups, self._said, strict=False)):
            for key, before in said.items():
                now = group.get(key)
                if now is not before and now != before:
                    yield number, key, now, before


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value

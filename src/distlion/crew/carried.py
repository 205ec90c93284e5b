"""State that travels with the parameters: schedulers, samplers and the like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from distlion.checkpoint.tree import decode_tree, encode_tree
from distlion.errors import CheckpointError, CrewError, InvalidArgumentError


class Carried(Protocol):
    """A scheduler, a sampler: newcomers take its state from the most advanced worker."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings, lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state."""
        ...


class CarriedState:
    """The objects that a worker carries, by name, and states for objects not made yet."""

    def __init__(self) -> None:
        self._carried: dict[str, Carried] = {}
        self._waiting: dict[str, dict[str, Any]] = {}

    def add(self, carried: Mapping[str, Carried]) -> bool:
        """Carry these objects too; return whether one of them has taken a waiting state.

        Raises:
            InvalidArgumentError: Another object has this name.
            CrewError: A state holds a value that cannot be carried.
        """
        for name, each in carried.items():
            if self._carried.get(name, each) is not each:
                raise InvalidArgumentError(f"{name!r} is carried already; give it another name")
            encode_state({name: each.state_dict()})
        self._carried.update(carried)
        waiting = {name: self._waiting.pop(name) for name in carried if name in self._waiting}
        for name, state in waiting.items():
            carried[name].load_state_dict(state)
        return bool(waiting)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the states of the carried objects, by name."""
        return {name: each.state_dict() for name, each in self._carried.items()}

    def take(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Load the states of the carried objects, and keep states for objects not made yet."""
        self._waiting = {name: state for name, state in states.items() if name not in self._carried}
        for name in self._carried.keys() & states.keys():
            self._carried[name].load_state_dict(states[name])

    def check(self) -> None:
        """Check that this worker carries everything that the most advanced worker carries.

        Raises:
            CrewError: It does not.
        """
        if self._waiting:
            names = ", ".join(sorted(self._waiting))
            raise CrewError(
                f"other workers carry {names}, and this one does not; call crew.carry() with the "
                "same names on all workers before the first step"
            )


def encode_state(state: Any) -> str:
    """Turn a state into text that ``decode_state`` turns back, keys and tuples included.

    Raises:
        CrewError: It holds a tensor, or anything that is not a number, string or container.
    """
    tensors: dict[str, Any] = {}
    try:
        text = json.dumps(encode_tree(state, "what is carried", tensors))
    except (CheckpointError, TypeError, ValueError) as error:
        raise CrewError(
            f"param groups and carried states must be numbers, strings, lists and dicts ({error})"
        ) from error
    if tensors:
        raise CrewError("a tensor or an array cannot be carried; give numbers, lists and dicts")
    return text


def decode_state(text: str) -> Any:
    """Invert ``encode_state``."""

    def read(name: str) -> Any:
        raise CrewError(f"the most advanced worker has sent a tensor, {name}")

    return decode_tree(json.loads(text), read)

"""State that travels with parameters, such as hyperparameters and samplers, and its handover."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from distlion.checkpoint.tree import decode_tree, encode_tree
from distlion.crew.epoch import FormingError
from distlion.crew.signed import SignedStore
from distlion.errors import (
    CheckpointError,
    CrewError,
    InvalidArgumentError,
    UnsupportedTypeError,
)
from distlion.optim.saved_groups import WORKER_KEY
from distlion.wire.watch import PeerWatch

logger = logging.getLogger("distlion")


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
            UnsupportedTypeError: An object has no state.
            CrewError: A state holds a value that cannot be carried.
        """
        for name, each in carried.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UnsupportedTypeError(
                    f"{name}={each!r}: expected an object with state_dict() and load_state_dict(), "
                    "such as a scheduler"
                )
            if self._carried.get(name, each) is not each:
                raise InvalidArgumentError(f"{name!r} is carried already; give it another name")
            encode_state({name: each.state_dict()})
        self._carried.update(carried)
        waiting = {name: self._waiting.pop(name) for name in carried if name in self._waiting}
        for name, state in waiting.items():
            carried[name].load_state_dict(state)
        return bool(waiting)

    def has(self, each: object) -> bool:
        """Return whether this object is carried."""
        return any(carried is each for carried in self._carried.values())

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
        raise CrewError(
            f"{find_tensor(state, 'what is carried')} is a tensor or an array, which cannot be "
            "carried; give numbers, lists and dicts"
        )
    return text


def find_tensor(value: Any, place: str) -> str | None:
    """Return the place of the first tensor or array in a state; None if it has none."""
    if isinstance(value, Tensor | np.ndarray):
        return place
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    found = (find_tensor(item, f"{place}.{key}") for key, item in pairs)
    return next((each for each in found if each is not None), None)


def decode_state(text: str) -> Any:
    """Invert ``encode_state``."""

    def read(name: str) -> Any:
        raise CrewError(f"the most advanced worker has sent a tensor, {name}")

    return decode_tree(json.loads(text), read)


_PIECE = 4 << 20  # torch's store closes a connection on which more than 8 MiB come at once
_NAME = "handover"
_UNFIT = "unfit"
"""Key of what is given in place of a state that cannot be carried: the reason."""


def give(store: SignedStore, state: Any) -> None:
    """Give the others a state, through the store of an epoch.

    If it holds a value that cannot be carried, workers that need it, newcomers and those that have
    fallen behind, are turned away. This worker and the others train on.
    """
    try:
        text = encode_state(state)  # ASCII
    except CrewError as error:
        logger.warning("newcomers are turned away, as there is no state to give them: %s", error)
        text = encode_state({_UNFIT: str(error)})
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{_NAME}/{number}", piece)
    store.set(_NAME, str(len(pieces)))


def take(store: SignedStore, *, limit_s: float, watch: PeerWatch | None) -> Any:
    """Wait for the state that is given, and return it.

    Args:
        store: The epoch's store.
        limit_s: Seconds to wait.
        watch: The watch of the epoch's group, which finds out meanwhile if somebody is lost.

    Raises:
        FormingError: It does not come.
        CrewError: The most advanced worker has a state that cannot be carried.
    """
    deadline_s, waiting = time.monotonic() + limit_s, object()
    if watch is not None:
        watch.enter_exchange(waiting)
    try:
        while not store.check([_NAME]):
            is_over = watch is not None and watch.alarmed.is_set()
            if time.monotonic() > deadline_s or is_over:
                raise FormingError("the most advanced worker is gone")
            time.sleep(0.005)
    finally:
        if watch is not None:
            watch.leave_exchange(waiting)
    numbers = range(store.read(_NAME, int))
    state = decode_state("".join(store.get(f"{_NAME}/{number}") for number in numbers))
    if _UNFIT in state:
        raise CrewError(
            f"the most advanced worker has nothing to hand over ({state[_UNFIT]}). Start this "
            "worker again once that is mended"
        )
    return state


def clear(store: SignedStore) -> None:
    """Delete the given state, once all have it."""
    for number in range(store.read(_NAME, int)):
        store.delete_key(f"{_NAME}/{number}")


_OWN = ("params", "param_names", "aggregation", WORKER_KEY)
"""Keys that do not change during training."""


def describe_groups(
    groups: Sequence[Mapping[str, Any]], *, but: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the hyperparameters of all groups, as numbers, without some keys."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in (*_OWN, *but)
        }
        for group in groups
    ]


def check_group(group: object) -> None:
    """Check that a newcomer can be given what is in a param group beside parameters.

    Raises:
        CrewError: It has a value that cannot be carried.
    """
    if isinstance(group, dict):  # torch refuses what is none
        encode_state(describe_groups([group]))


def check_groups(own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that another worker has as many groups as this one.

    Raises:
        CrewError: It has a different number of groups.
    """
    if len(given) != len(own):
        raise CrewError(
            f"the most advanced worker has {len(given)} param groups, and this one "
            f"{len(own)}; do all workers run the same script?"
        )


def take_groups(own: Sequence[dict[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Write another worker's hyperparameters into this one's groups.

    Raises:
        CrewError: It has a different number of groups.
    """
    check_groups(own, given)
    for group, values in zip(own, given, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key] = torch.full_like(group[key], value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

"""Handover of state, apart from parameters, from the most advanced worker to the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distlion.crew.carried import decode_state, encode_state
from distlion.crew.rendezvous import FormingError
from distlion.crew.signed_store import SignedStore

_PIECE = 4 << 20  # torch's store closes a connection on which more than 8 MiB come at once
_NAME = "handover"


def give(store: SignedStore, state: Any) -> None:
    """Give the others a state, through the store of an epoch.

    Raises:
        CrewError: It holds a value that cannot be carried.
    """
    text = encode_state(state)  # ASCII
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{_NAME}/{number}", piece)
    store.set(_NAME, str(len(pieces)))


def take(store: SignedStore, *, limit_s: float, is_over: Callable[[], bool]) -> Any:
    """Wait for the state that is given, and return it.

    Args:
        store: The epoch's store.
        limit_s: Seconds to wait.
        is_over: Function that returns whether somebody was lost meanwhile.

    Raises:
        FormingError: It does not come.
    """
    deadline_s = time.monotonic() + limit_s
    while not store.check([_NAME]):
        if time.monotonic() > deadline_s or is_over():
            raise FormingError("the most advanced worker is gone")
        time.sleep(0.005)
    numbers = range(store.read(_NAME, int))
    return decode_state("".join(store.get(f"{_NAME}/{number}") for number in numbers))


def clear(store: SignedStore) -> None:
    """Delete the given state, once all have it."""
    for number in range(store.read(_NAME, int)):
        store.delete_key(f"{_NAME}/{number}")

"""The table of operations: what can be done, and what is promised of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from fuzz.players import Player
from fuzz.program import Setup

Args = dict[str, Any]


class Promise(Enum):
    """How an operation may end."""

    OK = "it succeeds on all ranks"
    REFUSED = "one typed error on all ranks, and nothing changes"
    EITHER = "it succeeds on all ranks, or is refused on all"
    ATOMIC = "an error on all ranks; all have committed the step, or none"


@dataclass(frozen=True)
class Operation:
    """One line of the table.

    Attributes:
        play: What a player does.
        draw: Draws arguments; None where it does not apply to a setup.
        promise: What is promised of it.
        is_modelled: Whether the model does it too. What is not must leave no trace.
        is_last: Whether a program ends with it.
        weight: How often it is drawn.
    """

    play: Callable[[Player, Args], None]
    draw: Callable[[Random, Setup], Args | None]
    promise: Callable[[Setup, Args], Promise]
    is_modelled: bool
    is_last: bool
    weight: float


TABLE: dict[str, Operation] = {}


def operation(
    draw: Callable[[Random, Setup], Args | None],
    promise: Promise | Callable[[Setup, Args], Promise] = Promise.OK,
    *,
    is_modelled: bool = False,
    is_last: bool = False,
    weight: float = 1.0,
) -> Callable[[Callable[[Player, Args], None]], Callable[[Player, Args], None]]:
    """Put a function into the table, under its own name."""
    promised = promise if callable(promise) else lambda setup, args: promise

    def register(play: Callable[[Player, Args], None]) -> Callable[[Player, Args], None]:
        TABLE[play.__name__] = Operation(play, draw, promised, is_modelled, is_last, weight)
        return play

    return register


def draw_key(random: Random) -> int:
    """Draw what gradients depend on."""
    return random.randrange(1 << 30)

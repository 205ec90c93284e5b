"""What a comparison knows of a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from distlion.lab.training.virtual_method import Entry, VirtualMethod


class MethodKind(str, Enum):
    """On which side a method is."""

    OURS = "ours"
    BASELINE = "baseline"
    FULL_PRECISION = "full precision"


@dataclass(frozen=True)
class Contender:
    """A method that can be compared.

    Attributes:
        name: What the command line calls it.
        description: A phrase for the report.
        definition: The same to the last number; a record is that of a method as defined here.
        kind: On which side it is.
        base_lr: Center of its grid of learning rates.
        weight_decay: Unless a comparison sets one for all.
        enter: Builds it.
    """

    name: str
    description: str
    definition: str
    kind: MethodKind
    base_lr: float
    weight_decay: float
    enter: Callable[[Entry], VirtualMethod]

"""What the parent of a sweep and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """What a worker shall do.

    Attributes:
        verb: Name of a method of ``SweepWorker``.
        arguments: Of that method.
    """

    verb: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What came of it.

    Attributes:
        value: What the method returned.
        refusal: Why it could not be done, the worker being as before; "" if it was.
    """

    value: Any = None
    refusal: str = ""


@dataclass(frozen=True)
class Block:
    """One timed block of steps on one worker.

    Attributes:
        seconds: From after the barrier before it until its own last step was done.
        cpu_seconds: Processor time of its process, all threads, user and system.
        retransmitted: Segments that TCP on its host sent again.
        sent_bytes: Of the last step, as the optimizer counts; None for a baseline.
        wire_bytes: What the interface should count for that step; None for a baseline.
    """

    seconds: float
    cpu_seconds: float
    retransmitted: int
    sent_bytes: int | None
    wire_bytes: int | None

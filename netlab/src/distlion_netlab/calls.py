"""Messages between the parent of a sweep and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """An order to a worker.

    Attributes:
        verb: Name of a method of ``SweepWorker``.
        arguments: Arguments of that method.
    """

    verb: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A worker's answer to an order.

    Attributes:
        value: Value that the method returned.
        refusal: Reason why the order could not be done, with the worker unchanged; "" if it was
            done.
    """

    value: Any = None
    refusal: str = ""


@dataclass(frozen=True)
class Block:
    """One timed block of steps on one worker.

    Attributes:
        seconds: Seconds from the end of the barrier before it to the end of the worker's last step.
        cpu_seconds: Processor time of the worker's process: all threads, user and system.
        retransmitted: Segments that TCP on the worker's host sent again.
        sent_bytes: Bytes of the last step by the optimizer's account; None for a baseline.
        wire_bytes: Bytes that the interface should count for that step; None for a baseline.
    """

    seconds: float
    cpu_seconds: float
    retransmitted: int
    sent_bytes: int | None
    wire_bytes: int | None

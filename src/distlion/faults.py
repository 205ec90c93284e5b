"""Fault points, at which tests make a chosen rank fail at a chosen step. Inert until armed.

Example:
    >>> fault = arm(rank=1, step=5, point="after_encode", action=lambda optimizer: os.abort())
    >>> ...  # run; then check that it happened
    >>> assert fault.fired == 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from distlion.errors import InvalidArgumentError

StepPoint = Literal[
    "before_step",
    "after_encode",
    "framed",
    "counted",
    "before_commit",
    "after_commit",
    "checkpoint",
]
FormingPoint = Literal["arrive", "roster", "connect", "broadcast", "load"]
JoinPoint = Literal["stream", "piece", "replay", "caught_up", "admit"]
Point = StepPoint | FormingPoint | JoinPoint
POINTS: tuple[StepPoint, ...] = get_args(StepPoint)
FORMING_POINTS: tuple[FormingPoint, ...] = get_args(FormingPoint)
JOIN_POINTS: tuple[JoinPoint, ...] = get_args(JoinPoint)


@dataclass
class Fault:
    """One armed fault; ``fired`` counts how often it has happened."""

    rank: int
    step: int
    point: Point
    action: Callable[[object], None]
    fired: int = 0


armed: list[Fault] = []
"""The armed faults; callers of ``fire`` test this first, so that steps pay nothing."""


def arm(*, rank: int, step: int, point: Point, action: Callable[[object], None]) -> Fault:
    """Arm ``action`` for one rank, step and point of this process.

    Args:
        rank: Rank in the voting group; while a crew forms an epoch, or a newcomer catches up, the
            number of the worker in the crew.
        step: Step, counted from 0.
        point: "before_step" (nothing has happened), "after_encode" (votes packed, checks of the
            gradients still to come), "framed" (a checksummed chunk is about to be sent; ``action``
            gets its bytes, a uint8 tensor), "counted" (this rank has received and counted votes;
            ``action`` gets a header), "before_commit" (all replies are in), "after_commit",
            "checkpoint" (each place where a crash may leave files that are being saved; ``action``
            gets its name). While an epoch is formed: "arrive" (this worker is about to announce
            itself), "roster" (all know the members), "connect" (they are connected), "broadcast"
            (they have compared settings and copied parameters), "load" (nothing can fail any more,
            and received state is about to be kept). While a newcomer catches up: "stream" (its
            donor is about to send a piece of its parameters), "piece" (it has come), "replay" (a
            reply is about to be replayed), "caught_up" (it is about to ask to be let in), "admit"
            (a member has seen that it asks, and is about to leave its epoch); the first is a point
            of the donor, the last of each member, the others of the newcomer; ``step`` is the
            number of the piece or reply, 0 at "caught_up", and the committed step at "admit". At
            other points ``action`` gets the optimizer.
        action: Function called each time that rank, step and point match.

    Returns:
        The fault; tests must check its ``fired``.

    Raises:
        InvalidArgumentError: There is no such point.
    """
    known = *POINTS, *FORMING_POINTS, *JOIN_POINTS
    if point not in known:
        raise InvalidArgumentError(f"point={point!r}: expected one of {', '.join(known)}")
    fault = Fault(rank, step, point, action)
    armed.append(fault)
    return fault


def disarm_all() -> None:
    """Forget every armed fault."""
    armed.clear()


def fire(*, rank: int, step: int, point: Point, subject: object) -> None:
    """Run the faults armed for this rank, step and point; they may break ``subject``."""
    for fault in armed:
        if (fault.rank, fault.step, fault.point) == (rank, step, point):
            fault.fired += 1
            fault.action(subject)

"""Checks of the arguments of local steps, apart from the inner optimizer and the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.agreement import Agreement
from distlion.step.arguments import check_record


def check_every_steps(every: object) -> int:
    """Check H, the steps between votes, and return it.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: It is not an integer, or less than 1.
    """
    if not isinstance(every, int) or isinstance(every, bool):
        raise UnsupportedTypeError(f"every={every!r}: expected an integer")
    if every < 1:
        raise InvalidArgumentError(f"every={every}: expected 1 or more steps between votes")
    return every


def check_agreement(agreement: Agreement) -> Agreement:
    """Check that nobody is left out of votes on deltas, and return the record.

    Raises:
        InvalidArgumentError: Workers are to be excluded.
        UnsupportedTypeError: It is not an ``Agreement``.
    """
    check_record("agreement", agreement, Agreement)
    if agreement.excludes:
        raise InvalidArgumentError(
            f"agreement={agreement}: votes on deltas leave nobody out. Expected "
            f"on_disagreement='warn'. Use Agreement(every={agreement.every})"
        )
    return agreement


def check_delay(delay: object, every: int) -> int:
    """Check and return the number of steps after which an outcome is taken.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: It is not an integer from 0 to H - 1.
    """
    if not isinstance(delay, int) or isinstance(delay, bool):
        raise UnsupportedTypeError(f"delay={delay!r}: expected an integer")
    if delay and every == 1:
        raise InvalidArgumentError(
            f"delay={delay}: with every=1 the next vote begins one step later, before this outcome "
            "would be taken. Expected delay=0. For later outcomes choose a larger every"
        )
    if not 0 <= delay < every:
        raise InvalidArgumentError(
            f"delay={delay}: expected 0 to {every - 1} steps, less than every={every}"
        )
    return delay


def check_parts(parts: object, every: int) -> int:
    """Check P, the number of parts that take turns to vote, and return it.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: It is not an integer that divides H.
    """
    if not isinstance(parts, int) or isinstance(parts, bool):
        raise UnsupportedTypeError(f"parts={parts!r}: expected an integer")
    if parts < 1 or every % parts:
        raise InvalidArgumentError(
            f"parts={parts}: expected a divisor of every={every}, so that votes are equally far "
            "apart. Choose another every, or fewer parts"
        )
    return parts


@dataclass(frozen=True)
class Schedule:
    """The steps at which workers vote, and at which they take the outcome.

    Attributes:
        every: H, steps from one vote on a parameter to the next.
        delay: Steps after which an outcome is taken.
        parts: P, parts of the parameters that take turns to vote.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A number is out of range or not an integer.
    """

    every: int
    delay: int
    parts: int

    def __post_init__(self) -> None:
        check_every_steps(self.every)
        check_parts(self.parts, self.every)
        check_delay(self.delay, self.every)
        if self.delay >= self.interval and self.parts > 1:
            raise InvalidArgumentError(
                f"delay={self.delay}: with every={self.every} and parts={self.parts} a vote begins "
                f"every {self.interval} steps, and one can be under way. Expected 0 to "
                f"{self.interval - 1} steps. Choose a larger every, or fewer parts"
            )

    @property
    def interval(self) -> int:
        """Steps from one vote to the next, on whichever part: H / P."""
        return self.every // self.parts

    def check_tensors(self, params: Sequence[Tensor]) -> None:
        """Check that each part gets a tensor.

        Raises:
            InvalidArgumentError: There are too few that have elements.
        """
        n_tensors = sum(param.numel() > 0 for param in params)
        if self.parts > max(n_tensors, 1):
            raise InvalidArgumentError(
                f"parts={self.parts}: a part is made of whole tensors, and {n_tensors} are "
                f"trained. Expected at most {max(n_tensors, 1)}"
            )

    def describe(self) -> str:
        """Describe the schedule in a line that must be equal on all workers."""
        parts = "" if self.parts == 1 else f", in {self.parts} parts"
        return f"local steps: a vote every {self.every}, taken {self.delay} later{parts}"


def find_common_device(given: object) -> torch.device | None:
    """Return the common point's device; None for the device of each parameter.

    Raises:
        InvalidArgumentError: torch knows no such device, or it holds no values.
        UnsupportedTypeError: It is neither a device nor the name of one.
    """
    if given is None:
        return None
    if not isinstance(given, str | torch.device):
        raise UnsupportedTypeError(
            f"common_device={given!r}: expected a device such as 'cpu' or 'cuda:0', or None"
        )
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise _refuse_device(given, error) from error
    if device.type == "meta":
        raise InvalidArgumentError(
            "common_device='meta': a meta tensor has no values. Expected a device such as 'cpu'"
        )
    return device


def check_common_device(device: torch.device) -> None:
    """Check that tensors can be made on the device of the common point.

    Raises:
        InvalidArgumentError: torch was built without it, or this machine does not have it.
    """
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except Exception as error:  # of any class, by backend
        raise _refuse_device(device, error) from error


def _refuse_device(device: object, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"common_device={str(device)!r} cannot be used here ({type(error).__name__}: "
        f"{str(error).splitlines()[0][:120]}). Expected a device of this machine, such as 'cpu'"
    )

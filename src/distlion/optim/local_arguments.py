"""Checks of what is given to local steps beside an inner optimizer and an outer step."""

from __future__ import annotations

import torch

from distlion.errors import InvalidArgumentError, UnsupportedTypeError


def check_every_steps(every: object) -> int:
    """Return H.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: It is no integer, or less than 1.
    """
    if not isinstance(every, int) or isinstance(every, bool):
        raise UnsupportedTypeError(f"every={every!r}: expected an integer")
    if every < 1:
        raise InvalidArgumentError(f"every={every}: expected 1 or more steps between votes")
    return every


def check_delay(delay: object, every: int) -> int:
    """Return the number of steps after which an outcome is taken.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: It is no integer from 0 to H - 1.
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


def find_common_device(given: object) -> torch.device | None:
    """Return where the common point is kept; None for the device of each parameter.

    Raises:
        InvalidArgumentError: torch knows no such device, or it holds no values.
        UnsupportedTypeError: It is no device, nor the name of one.
    """
    if given is None:
        return None
    if not isinstance(given, str | torch.device):
        raise UnsupportedTypeError(
            f"common_on={given!r}: expected a device such as 'cpu' or 'cuda:0', or None"
        )
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise _refuse_device(given, error) from error
    if device.type == "meta":
        raise InvalidArgumentError(
            "common_on='meta': a meta tensor has no values. Expected a device such as 'cpu'"
        )
    return device


def check_common_device(device: torch.device) -> None:
    """Check that tensors can be made on the device of the common point.

    Raises:
        InvalidArgumentError: torch was built without it, or this machine has none.
    """
    try:
        torch.empty(0, device=device)
    except Exception as error:  # of any class, by backend
        raise _refuse_device(device, error) from error


def _refuse_device(device: object, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"common_on={str(device)!r} cannot be used here ({type(error).__name__}: "
        f"{str(error).splitlines()[0][:120]}). Expected a device of this machine, such as 'cpu'"
    )

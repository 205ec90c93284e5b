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
        InvalidArgumentError: There is no such device here, or it holds no values.
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
        if device.type == "meta":
            raise InvalidArgumentError(
                "common_on='meta': a meta tensor has no values. Expected a device such as 'cpu'"
            )
        torch.empty(0, device=device)
    except InvalidArgumentError:
        raise
    # Of a name that torch does not know, a backend that it was built without, a missing device.
    except Exception as error:
        raise InvalidArgumentError(
            f"common_on={str(given)!r} cannot be used here ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:120]}). Expected a device of this machine, such as 'cpu'"
        ) from error
    return device

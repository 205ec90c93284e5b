"""Checks of the arguments of local steps, apart from the inner optimizer and the outer step."""

from __future__ import annotations

import torch

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.agreement import Agreement
from distlion.step.arguments import check_record


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

"""The number of a worker, as a user gives it to what plays many of them."""

from __future__ import annotations

import operator
from typing import Any

from distlion.errors import UnsupportedTypeError


def read_worker(worker: Any) -> int:
    """Return the number of a worker as Python's integer, of whatever type of integer it is.

    Raises:
        UnsupportedTypeError: It is no integer.
    """
    if not isinstance(worker, bool):
        try:
            return int(operator.index(worker))
        except TypeError:
            pass
    raise UnsupportedTypeError(f"worker={worker!r}: expected an integer")

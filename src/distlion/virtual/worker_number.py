"""The number of a worker, as a user gives it to a virtual cluster."""

from __future__ import annotations

import operator
from typing import Any

from distlion.errors import UnsupportedTypeError


def read_worker(worker: Any) -> int:
    """Return the number of a worker as Python's integer, from any type of integer.

    Raises:
        UnsupportedTypeError: It is not an integer.
    """
    if not isinstance(worker, bool):
        try:
            return int(operator.index(worker))
        except TypeError:
            pass
    raise UnsupportedTypeError(f"worker={worker!r}: expected an integer")

"""Numbers of numpy as those of Python, which arguments are kept as."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_python(value: Any) -> Any:
    """Return a number of numpy as Python's, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def keep_as_python(record: object, *names: str) -> None:
    """Let fields of a frozen record be Python's numbers, where numpy's were given.

    Records are compared by their text, in which numpy's numbers look different.
    """
    for name in names:
        object.__setattr__(record, name, as_python(getattr(record, name)))

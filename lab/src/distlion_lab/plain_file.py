"""Files from elsewhere, read within a limit and without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from distlion_lab.errors import DataError


def read_plain_file(path: Path, *, limit_bytes: int) -> bytes:
    """Read a whole file.

    Raises:
        DataError: It cannot be read, is a pipe or a device, or has more than ``limit_bytes`` bytes;
            the message has the reason, but no path.
    """
    try:
        # A pipe would block until somebody writes to it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise DataError("it is a pipe or a device, not a plain file")
            # The size first, as reading a sparse file would fill the memory. Files of /proc have 0.
            data = b"" if state.st_size > limit_bytes else file.read(limit_bytes + 1)
    except OSError as error:
        raise DataError(error.strerror or str(error)) from error
    if max(state.st_size, len(data)) > limit_bytes:
        raise DataError(f"it has more than {limit_bytes:,} bytes")
    return data

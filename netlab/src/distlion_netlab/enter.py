"""Enter a network namespace, and run a command that dies with the process that started it.

    python enter.py NAMESPACE-FILE PARENT COMMAND...

Run as a file, not as a module of the package: importing the package takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def enter_and_run(namespace: str, parent: int, command: list[str]) -> None:
    """Enter the namespace and replace this process by the command; return only by an exception.

    Raises:
        OSError: The namespace cannot be entered, or the command cannot be run.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before it was watched
        os._exit(1)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), namespace)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        enter_and_run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    except OSError as error:
        sys.stderr.write(f"distlion: {error.filename or sys.argv[3]}: {error.strerror}\n")
        sys.exit(_CANNOT_RUN)

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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before it was watched
        os._exit(1)
    enter_namespace(namespace)
    os.execvp(command[0], command)


def enter_namespace(namespace: str) -> None:
    """Move the calling thread, and those that it starts from now on, to a network namespace.

    Raises:
        OSError: The namespace cannot be entered.
    """
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    try:
        enter_and_run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    except OSError as error:
        sys.stderr.write(f"distlion: {error.filename or sys.argv[3]}: {error.strerror}\n")
        sys.exit(_CANNOT_RUN)

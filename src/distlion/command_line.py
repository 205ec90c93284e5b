"""Shared by commands: parsers, and errors that end a command with one line and a status."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

from distlion.errors import DistlionError, InvalidArgumentError

FAILED = 1
"""Exit status: the command line is right, and the work failed."""

MISUSED = 2
"""Exit status: the command line is wrong, and nothing was started."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_MOST_DIGITS = 18


class Parser(argparse.ArgumentParser):
    """A parser that reports misuse in one line, and takes no abbreviated options."""

    def __init__(self, **more: object) -> None:
        super().__init__(allow_abbrev=False, **more)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        show_error(f"{message} (see {self.prog} --help)")
        sys.exit(MISUSED)


def read_whole(text: str) -> int:
    """Return a whole number of ASCII digits; ``int`` alone would read ``1_0`` as 10."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"a number has {_MOST_DIGITS} digits at most")
    return int(text)


def show_error(message: str) -> None:
    """Print a line to standard error."""
    print(f"distlion: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown_failures() -> Iterator[None]:
    """Turn errors of distlion, refused output and Ctrl-C into one line and an exit status.

    Raises:
        SystemExit: Its status is 2 if the command line is wrong, 1 if the work failed, 130 after
            Ctrl-C. Any other exception is a bug and keeps its traceback.
    """
    try:
        try:
            yield
        finally:
            # Buffered output may be refused too, and an error at exit would go unseen.
            sys.stdout.flush()
    except InvalidArgumentError as error:
        show_error(str(error))
        sys.exit(MISUSED)
    except DistlionError as error:
        show_error(f"{type(error).__name__}: {error}")
        sys.exit(FAILED)
    except OSError as error:
        if not report_refused_output(error):
            raise
        sys.exit(FAILED)
    except KeyboardInterrupt:
        show_error("interrupted")
        sys.exit(INTERRUPTED)


def report_refused_output(error: OSError) -> bool:
    """Report in one line that output cannot be written; return whether that was the error.

    A reader that has gone, such as ``head``, has all it wanted: nothing is reported then.
    """
    if not _is_refused(sys.stdout):
        return _is_refused(sys.stderr) or error.errno == errno.EPIPE
    if error.errno != errno.EPIPE:
        try:
            show_error(f"standard output cannot be written: {error.strerror}")
        except OSError:
            _detach(sys.stderr)
    return True


def _is_refused(stream: TextIO) -> bool:
    """Return whether a stream refuses one more character, and detach it then."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        _detach(stream)
        return True
    return False


def _detach(stream: TextIO) -> None:
    """Let a stream write to nowhere: the interpreter flushes at exit, and would report it again."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())

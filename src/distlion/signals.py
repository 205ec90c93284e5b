"""Deferred signals: exceptions of their handlers wait for the end of an atomic block."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LISTEN_S = 0.1
"""Seconds that the main thread waits at a time for another one: a signal wakes neither a wait that
begins as it comes nor one whose process got it on another thread."""
Handler = Callable[[int, FrameType | None], Any]

logger = logging.getLogger("distlion")


class Deferral:
    """The exceptions of signal handlers during a block that must not be interrupted.

    Args:
        what: Name of the block, for the log.
        gives_way: Whether a second exception is raised at once.

    Attributes:
        error: The first exception of a handler; None before.
    """

    def __init__(self, what: str, *, gives_way: bool = True) -> None:
        self._what, self._gives_way = what, gives_way
        self._before: dict[int, tuple[Handler, Handler]] = {}
        self._is_over = False
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Keep exceptions of handlers from now on."""
        # In order of numbers, so that Ctrl-C, the most frequent one, is deferred first.
        for number in signal.Signals:
            handler = signal.getsignal(number)
            if callable(handler):
                keeping = self._keep_errors_of(handler)
                self._before[number] = handler, keeping
                signal.signal(number, keeping)

    def end(self) -> None:
        """Return signals to their own handlers."""
        # First: a signal may cut the loop short, and wrappers left in place must not keep errors.
        self._is_over = True
        for number, (handler, keeping) in self._before.items():
            if signal.getsignal(number) is keeping:  # a handler may have chosen another one
                signal.signal(number, handler)

    def _keep_errors_of(self, handler: Handler) -> Handler:
        def keep(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                if self._is_over or (self._gives_way and self.error is not None):
                    raise
                if self.error is None:
                    self.error = error
                    self._log(error)

        return keep

    def _log(self, error: BaseException) -> None:
        if self._gives_way:
            logger.warning(
                "%s waits for the end of %s; the next one cuts it short",
                type(error).__name__,
                self._what,
            )


@contextmanager
def deferred_signals(what: str, *, gives_way: bool = True) -> Iterator[Deferral]:
    """Defer exceptions of signal handlers, such as KeyboardInterrupt, to the end of the block.

    Handlers run when their signals come. The first exception that one of them raises is raised when
    the block has ended, even if the block raises another one. Python runs handlers on the main
    thread: on other threads this does nothing.

    Args:
        what: Name of the block, for the log.
        gives_way: Whether a second exception is raised at once. A short block that would leave
            processes behind if it were cut short does not give way.
    """
    deferral = Deferral(what, gives_way=gives_way)
    if threading.current_thread() is not threading.main_thread():
        yield deferral
        return
    try:
        deferral.begin()
        yield deferral
    finally:
        deferral.end()
        if deferral.error is not None:
            raise deferral.error

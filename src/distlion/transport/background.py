"""Threads that ask a store now and then; none of them is in a call when the interpreter ends."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial


def run_in_background(function: Callable[[], None], ended: threading.Event, name: str) -> None:
    """Run a function on a thread; at exit the event is set, and the thread waited for.

    A thread that asks a store while the interpreter is wound up would abort the process.

    Args:
        function: Returns soon after ``ended`` is set.
        ended: Ends it.
        name: Of the thread.
    """
    has_stopped = threading.Event()
    stop = atexit.register(partial(_stop, ended, has_stopped))

    def run() -> None:
        try:
            function()
        finally:
            has_stopped.set()
            atexit.unregister(stop)

    threading.Thread(target=run, name=name, daemon=True).start()


def _stop(ended: threading.Event, has_stopped: threading.Event) -> None:
    ended.set()
    has_stopped.wait(1.0)

"""Threads that ask a store at intervals; none of them is in a call when the interpreter exits."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial


def run_in_background(function: Callable[[], None], ended: threading.Event, name: str) -> None:
    """Run a function on a thread; at exit, set the event and wait for the thread.

    A thread that asks a store while the interpreter shuts down would abort the process.

    Args:
        function: Function that returns soon after ``ended`` is set.
        ended: Event that ends it.
        name: Name of the thread.
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

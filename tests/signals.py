"""Ctrl-C for programs that tests start, wherever the tests themselves run."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """Let a new process end at SIGINT as one of a terminal does; for ``preexec_fn`` of Popen.

    What ``nohup`` or a shell's background job starts ignores SIGINT, and so does all that it starts
    in turn.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)

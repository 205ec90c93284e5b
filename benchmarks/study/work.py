"""Runs one after the other, shared by any number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from archive import Records
from runs import RunConfig

WAIT_S = 5.0

ListOpen = Callable[[], list[RunConfig]]
"""List what can be run now, most urgent first; done runs may change the list."""
Make = Callable[[RunConfig], dict[str, Any]]
"""Do a run, and return what is to be recorded."""


def run_until_done(list_open: ListOpen, records: Records, make: Make) -> None:
    """Do runs until none is left.

    Args:
        list_open: What can be run now.
        records: What runs leave.
        make: Does one.
    """
    while open_runs := list_open():
        if not any(perform(records, config, make) for config in open_runs):
            time.sleep(WAIT_S)  # other processes are at all of them


def perform(records: Records, config: RunConfig, make: Make) -> bool:
    """Do a run and record it; False where another process is at it or has done it."""
    with records.claim(config.name) as is_ours:
        if not is_ours or records.read(config.name) is not None:
            return False
        records.write(config, make(config))
    return True

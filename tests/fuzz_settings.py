"""How long and on what random inputs are tried.

DISTLION_FUZZ_SECONDS=300 makes the tests that use this run for that many seconds together, with
inputs that differ from run to run; without it each tries a few dozen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hypothesis import HealthCheck, settings

SECONDS = float(os.environ.get("DISTLION_FUZZ_SECONDS", "0"))
TESTS = 6

FUZZ = settings(
    max_examples=200 if SECONDS else 30,
    derandomize=not SECONDS,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def keep_on(fuzz: Callable[[], None]) -> None:
    """Call a fuzz test once, or for this test's part of the time."""
    end = time.monotonic() + SECONDS / TESTS
    fuzz()
    while time.monotonic() < end:
        fuzz()

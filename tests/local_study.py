"""The modules of benchmarks/local_steps, for its tests and for the workers that they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from programs import imported_by_name

MODULES = (
    *("target_path", "study_path", "schedule", "variants", "feedback", "masked", "scoring"),
    *("methods", "runs", "archive", "work", "cells", "plan", "evidence", "images", "text"),
    *("settings", "curves", "host", "laboratory", "drawing", "outcome"),
    *(
        "contest",
        "choices",
        "contestants",
        "diloco",
        "lab_host",
        "timing",
        "arrivals",
        "claims_made",
    ),
    *("pictures", "page"),
)


@contextmanager
def imported_study() -> Iterator[Any]:
    """The modules of the program and of those that it is made of."""
    with imported_by_name("local_steps", *MODULES) as found:
        yield found

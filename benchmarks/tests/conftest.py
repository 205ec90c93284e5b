"""The study's modules, for its tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from programs import imported_by_name

MODULES = (
    "schedule",
    "variants",
    "feedback",
    "scoring",
    "methods",
    "runs",
    "work",
    "archive",
    "cells",
    "plan",
    "images",
    "text",
    "evidence",
    "claims",
    "decisions",
    "figures",
    "report",
)


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The modules of the program, and the program itself as ``program``."""
    with imported_by_name("study", *MODULES) as found:
        yield found

"""Bugs to plant that random programs, or one that has found something, notice."""

from __future__ import annotations

from planted import Mutation

FOUND = "fuzz/test_fuzz.py::test_a_program_that_found_something_ends_as_it_must"

FUZZED = (
    Mutation(
        "accumulation within accumulation lets votes leave when the inner one ends",
        "voting/overlap.py",
        "self._paused = before",
        "self._paused = False",
        (f"{FOUND}[no_sync within no_sync]",),
    ),
    Mutation(
        "shares of momenta are rounded before they are added",
        "checkpoint/remap.py",
        "momentum.double() * float(weight)",
        "(momentum * float(weight)).double()",
        (f"{FOUND}[three workers' momenta for two]",),
    ),
)

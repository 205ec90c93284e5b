"""The modules of benchmarks/local_steps, and records to try them on, for tests and workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from programs import imported_by_name

MODULES = (
    *("target_path", "study_path", "schedule", "variants", "feedback", "masked", "scoring"),
    "inner_kinds",
    *("methods", "runs", "archive", "work", "cells", "plan", "evidence", "intervals"),
    *("images", "text"),
    *("settings", "curves", "host", "laboratory", "drawing", "outcome"),
    *(
        "contest",
        "choices",
        "contestants",
        "diloco",
        "lab_host",
        "timing",
        "arrivals",
        "contrasts",
        "claims_made",
    ),
    *("pictures", "whole_runs", "page", "inner_seconds", "inner_page"),
)


@contextmanager
def imported_study() -> Iterator[Any]:
    """The modules of the program and of those that it is made of."""
    with imported_by_name("local_steps", *MODULES) as found:
        yield found


Score = Callable[[Any], float]
"""The loss at the end of a run."""


def best_at(*factors: tuple[str, float], center: Mapping[str, float] | None = None) -> Score:
    """Score runs: rates near a center are best; a word in a name makes it better or worse."""

    def score(run: Any) -> float:
        best = (center or {}).get(run.task, 4e-3)
        loss = 2.0 + 0.1 * abs(math.log2(run.lr / best))
        return loss + sum(more for word, more in factors if word in run.method)

    return score


class Archive:
    """Records that end as a score says; curves fall to it in a straight line from 4."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.found: dict[str, dict[str, Any]] = {}

    def read(self, name: str) -> Mapping[str, Any] | None:
        return self.found.get(name)

    def add(self, run: Any) -> None:
        end = self._score(run)
        record = {"diverged": None, "name": run.name, "bits_up": 1.0, "bits_down": 1.0}
        record |= {"parameters": 4_000_000, "validation": [[run.steps, end, 0.5]]}
        record["test"] = {"loss": end, "units": {"values": [end, end]}}
        record["test_curve"] = [
            [step, 4 - (4 - end) * step / run.steps, 0.5] for step in range(0, run.steps + 1, 32)
        ]
        self.found[run.name] = record

    def complete(self, study: Any, *names: str, at_once: int | None = None) -> list[Any]:
        """Make every run that parts ask for; return them in order.

        Args:
            study: The modules.
            names: Of the parts.
            at_once: Runs to make before the list is asked for again; None for all of it.
        """
        parts = tuple(part for part in study.choices.PARTS if part.name in names)
        made: list[Any] = []
        while open_runs := study.choices.list_open_runs(parts, self.read)[:at_once]:
            for run in open_runs:
                self.add(run)
            made += open_runs
        return made


def with_all(study: Any, **seconds: float) -> dict[str, list[float]]:
    """Return seconds of every exchange: those given, and a second for the others."""
    names = ("mean", "half", "low rank", "low rank 4", "signs", "sparse", "majority", "compute")
    every = (*names, *study.contest.RULES)
    return {name: [seconds.get(name, 1.0)] for name in every}

"""Made-up records of the quality studies, for tests of what they decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Archive:
    """Records that end as a function of the run says.

    Args:
        quality: The modules.
        score: Returns the validation loss and the outcomes of the test units of a run.
    """

    def __init__(self, quality: Any, score: Callable[[Any], tuple[float, Sequence[float]]]) -> None:
        self._quality, self._score = quality, score
        self.found: dict[str, dict[str, Any]] = {}

    def find(self, name: str) -> Mapping[str, Any] | None:
        return self.found.get(name)

    def add(self, run: Any) -> None:
        loss, units = self._score(run)
        found = np.array(units)
        # Images are scored by how many are right, in percent.
        found = 1 - found / 100 if run.task == "images" else found
        self.found[run.name] = {
            "diverged": {"step": 1} if math.isinf(loss) else None,
            "validation": [[run.steps // 2, loss + 1.0, 0.4], [run.steps, loss, 0.9]],
            "test": {"units": self._quality.scoring.pack_units(found)},
            "name": run.name,
            "parameters": 120_064,
        }

    def complete(self, parts: Sequence[Any]) -> list[Any]:
        """Make every run that the parts ask for; return them in order."""
        made = []
        while open_runs := self._quality.design.list_open_runs(tuple(parts), self.find):
            for run in open_runs:
                self.add(run)
            made += open_runs
        return made


def best_at(*factors: tuple[str, float]) -> Callable[[Any], tuple[float, list[float]]]:
    """Score runs: rates near 1e-3 are best; a name that contains a word is better or worse."""

    def score(run: Any) -> tuple[float, list[float]]:
        loss = 2.0 + 0.1 * abs(math.log2(run.lr / 1e-3))
        loss += sum(more for word, more in factors if word in run.method)
        noise = np.random.default_rng(run.seed).normal(0, 0.001, 8)
        return loss, list(loss + noise)

    return score

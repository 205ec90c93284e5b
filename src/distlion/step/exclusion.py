"""Workers whose votes do not count while they disagree with the others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from distlion.step.reliability import LARGEST_GAP, LEAST_WORKERS, Counts, share_agreement

logger = logging.getLogger("distlion")

AGREEMENT_KEY = "agreement"
"""Key of the first param group with each worker's running agreement: by its id, as text; in saved
states a list in rank order, since ids mean nothing to a crew that is formed later."""
_FIRST = 0.5
_DECAY = 0.95


class Exclusion:
    """Leave out workers that agree with the others clearly less than the median worker does.

    Equation:
        a_i <- 0.95 a_i + 0.05 share_i, from 0.5 for all
        left out of the next votes: a_i < median_j(a_j) - ``LARGEST_GAP``

    share_i is a worker's agreement with the majority of the others on all sampled elements of a
    step. It is measured for workers that are left out too, so that they return. A worker that was
    absent, or is new, begins with the median of the others. The median worker is never left out.

    Args:
        groups: Param groups; the first one keeps the running agreements.
        voters: Ids of the workers that vote, in rank order.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], voters: Sequence[int]) -> None:
        self._groups, self._names = groups, [str(voter) for voter in voters]
        self._changes: list[str] = []
        saved = groups[0].get(AGREEMENT_KEY, ())
        if not isinstance(saved, Mapping):
            # Of another number of workers nobody knows who is who.
            fits = len(saved) == len(self._names)
            groups[0][AGREEMENT_KEY] = dict(zip(self._names, saved, strict=True)) if fits else {}
            low = ", ".join(map(str, sorted(self.find_excluded())))
            self._changes += [f"votes of workers {low} do not count, as when saved"] if low else []
        self._write(self._read())

    def find_excluded(self) -> frozenset[int]:
        """Find the workers whose next votes do not count, by place."""
        return _find_low(self._read())

    def observe(self, step: int, counts: Sequence[Counts], absent: Collection[int]) -> None:
        """Take one look.

        Args:
            step: The step that was diagnosed, counted from 0.
            counts: For each parameter of the step, ``count_agreement``. A worker without elements
                to compare keeps its running agreement.
            absent: Places of workers without any vote.
        """
        before = self._read()
        shares = share_agreement(counts, len(before))
        now = [
            mean if share is None else _DECAY * mean + (1 - _DECAY) * share
            for mean, share in zip(before, shares, strict=True)
        ]
        if others := [mean for place, mean in enumerate(now) if place not in absent]:
            first = median(others)
            now = [first if place in absent else mean for place, mean in enumerate(now)]
        self._write(now)
        self._note_changes(step, before, now)

    def _note_changes(self, step: int, before: Sequence[float], now: Sequence[float]) -> None:
        low = _find_low(now)
        for place in sorted(_find_low(before) ^ low):
            count = "do not count from the next step on" if place in low else "count again"
            self._changes.append(
                f"[step {step}] votes of worker {place} {count}: running agreement with the "
                f"majority of the others {now[place]:.1%}, of the median worker {median(now):.1%}"
            )

    def log_changes(self) -> None:
        """Log the changes since the last call; between steps, as a logger may raise."""
        changes, self._changes = self._changes, []
        for change in changes:
            logger.warning("%s", change)

    def _write(self, means: Sequence[float]) -> None:
        self._groups[0][AGREEMENT_KEY] = dict(zip(self._names, means, strict=True))

    def _read(self) -> list[float]:
        """Read the running agreements from the param group, by place."""
        saved: Mapping[str, float] = self._groups[0].get(AGREEMENT_KEY, {})
        known = [saved[name] for name in self._names if name in saved]
        first = median(known) if known else _FIRST
        return [saved.get(name, first) for name in self._names]


def _find_low(means: Sequence[float]) -> frozenset[int]:
    if len(means) < LEAST_WORKERS:
        return frozenset()
    least = median(means) - LARGEST_GAP
    return frozenset(place for place, mean in enumerate(means) if mean < least)


def is_agreement(value: object) -> bool:
    """Return whether a saved value can be a list of running agreements."""
    return isinstance(value, list) and all(
        isinstance(mean, float) and 0 <= mean <= 1 for mean in value
    )


def export_agreement(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved group keeps in place of running agreements by id."""
    kept = group.get(AGREEMENT_KEY)
    return {AGREEMENT_KEY: list(kept.values())} if isinstance(kept, Mapping) else {}


def describe_agreement(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line with the running agreements, if there are any."""
    kept = groups[0].get(AGREEMENT_KEY)
    return [] if kept is None else [f"agreement of workers: {kept!r}"]

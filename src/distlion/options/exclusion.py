"""Workers whose votes do not count for as long as they disagree with the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from distlion.options.reliability import LARGEST_GAP, LEAST_WORKERS, Counts, share_agreement

logger = logging.getLogger("distlion")

AGREEMENT_KEY = "agreement"
"""Key of the first param group with each worker's running agreement, by its id as text."""
_FIRST = 0.5
_DECAY = 0.95


class Exclusion:
    """Leave out workers that agree with the others clearly less than the median worker does.

    Equation:
        a_i <- 0.95 a_i + 0.05 share_i, from 0.5 for all
        left out of the next votes: a_i < median_j(a_j) - ``LARGEST_GAP``

    share_i is a worker's agreement with the majority of the others on all sampled elements of a
    step. It is measured for workers that are left out too, so that they return. A worker that joins
    others begins with their median. The median worker is never left out.

    Args:
        groups: Param groups; the first one keeps the running agreements, and states save them.
        voters: Ids of the workers that vote, in rank order.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], voters: Sequence[int]) -> None:
        self._groups, self._names = groups, [str(voter) for voter in voters]

    def find_excluded(self) -> frozenset[int]:
        """Find the workers whose next votes do not count, by place."""
        means = self._read()
        if len(means) < LEAST_WORKERS:
            return frozenset()
        least = median(means) - LARGEST_GAP
        return frozenset(place for place, mean in enumerate(means) if mean < least)

    def observe(self, step: int, counts: Sequence[Counts]) -> None:
        """Take one look; it is none for a worker without elements to compare.

        Args:
            step: The step that was diagnosed, counted from 0.
            counts: For each parameter of the step, ``count_agreement``.
        """
        before, means = self.find_excluded(), self._read()
        for place, share in enumerate(share_agreement(counts, len(means))):
            if share is not None:
                means[place] = _DECAY * means[place] + (1 - _DECAY) * share
        # A new dict, as states that were taken share the values of groups.
        self._groups[0][AGREEMENT_KEY] = dict(zip(self._names, means, strict=True))
        now = self.find_excluded()
        for place in sorted(before ^ now):
            logger.warning(
                "[step %d] votes of worker %d %s: it agrees with the majority of the others on "
                "%.1f%% of the elements compared, the median worker on %.1f%%",
                step,
                place,
                "do not count from the next step on" if place in now else "count again",
                100 * means[place],
                100 * median(means),
            )

    def _read(self) -> list[float]:
        """Read the running agreements from the param group, by place."""
        saved: Mapping[str, float] = self._groups[0].get(AGREEMENT_KEY, {})
        known = [saved[name] for name in self._names if name in saved]
        first = median(known) if known else _FIRST
        return [saved.get(name, first) for name in self._names]


def is_agreement(value: object) -> bool:
    """Return whether a saved value can be what the first param group keeps."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(mean, float) and 0 <= mean <= 1
        for name, mean in value.items()
    )


def describe_agreement(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line with the running agreements, if there are any."""
    kept = groups[0].get(AGREEMENT_KEY)
    return [] if kept is None else [f"agreement of workers: {kept!r}"]

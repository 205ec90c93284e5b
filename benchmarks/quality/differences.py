"""Differences between cells: intervals, p-values, and what may be said of them.

Lower outcomes are better. A difference is the method's outcome minus the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import study_path  # noqa: F401
from evidence import Ending
from intervals import spread
from settings import MARGINS

FALSE_DISCOVERIES = 0.05


class Verdict(Enum):
    """What may be said of a difference."""

    LEADS = "leads"
    MATCHES = "matches"
    TRAILS = "trails"
    INCONCLUSIVE = "inconclusive"
    OPEN = "not yet run"


@dataclass(frozen=True)
class Difference:
    """A method beside a reference.

    Attributes:
        method, reference: Their endings.
        n_seeds: In common.
        mean: Over seeds; infinite where one of the two diverged, NaN without seeds.
        low, high: The 95 % confidence interval; NaN below two seeds.
        p: Of the hypothesis that there is no difference; 1 where nothing is known.
        verdict: What may be said, once all claims are known.
    """

    method: Ending
    reference: Ending
    n_seeds: int
    mean: float
    low: float
    high: float
    p: float
    verdict: Verdict = Verdict.OPEN

    @property
    def margin(self) -> float:
        """Differences below it do not matter."""
        return MARGINS[self.method.cell.setting.task]

    @property
    def is_whole(self) -> bool:
        """Whether all runs of both are there."""
        return self.method.is_whole and self.reference.is_whole


def find_difference(method: Ending, reference: Ending) -> Difference:
    """Compare the seeds that two cells have in common; the verdict is still open."""
    failed = method.has_diverged - reference.has_diverged
    if failed:
        infinite = math.copysign(math.inf, failed)
        return Difference(method, reference, 0, infinite, infinite, infinite, 0.0)
    ended = [
        {seed for seed, record in ending.records.items() if not record["diverged"]}
        for ending in (method, reference)
    ]
    seeds = sorted(set.intersection(*ended))
    if not seeds:
        return Difference(method, reference, 0, math.nan, math.nan, math.nan, 1.0)
    by_unit = np.array([method.errors(seed) - reference.errors(seed) for seed in seeds])
    mean = float(by_unit.mean())
    if len(seeds) == 1:
        return Difference(method, reference, 1, mean, math.nan, math.nan, 1.0)
    half, p = spread(by_unit)
    return Difference(method, reference, len(seeds), mean, mean - half, mean + half, p)


def decide(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences with verdicts, under one false discovery rate for all of them.

    Those whose runs are not all there stay open, and do not count.
    """
    whole = [each for each in differences if each.is_whole]
    limit = find_limit([each.p for each in whole])
    return [
        replace(each, verdict=_judge(each, limit)) if each.is_whole else each
        for each in differences
    ]


def find_limit(p_values: Sequence[float]) -> float:
    """Return the largest p-value that counts as a discovery; below 0 for none.

    Reference:
        Y. Benjamini and Y. Hochberg, "Controlling the False Discovery Rate", 1995.
    """
    limit = -1.0
    for rank, p in enumerate(sorted(p_values), start=1):
        if p <= FALSE_DISCOVERIES * rank / len(p_values):
            limit = p
    return limit


def _judge(difference: Difference, limit: float) -> Verdict:
    if difference.n_seeds and max(-difference.low, difference.high) < difference.margin:
        return Verdict.MATCHES
    if math.isnan(difference.mean) or difference.p > limit:
        return Verdict.INCONCLUSIVE
    return Verdict.LEADS if difference.mean < 0 else Verdict.TRAILS

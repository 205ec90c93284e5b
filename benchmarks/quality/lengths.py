"""How distances to AdamW change with the length of runs, seed by seed. None of the claims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import study_path  # noqa: F401
from cells import Find
from design import choose_recipe, make_cell
from evidence import Ending
from intervals import spread
from settings import CAUTIOUS, PAPER, SHORT

PAIRS = (
    ("text-small-1k", "text-small-4k"),
    ("text-small-4k", "text-small-16k"),
    ("text-medium-1k", "text-medium-4k"),
)
"""Shorter and longer settings of one network. Longer runs of images have wider networks."""


@dataclass(frozen=True)
class Shrinkage:
    """How much smaller a distance to AdamW is in longer runs.

    Attributes:
        method: Name.
        shorter, longer: Names of the settings.
        n_seeds: In common, two or more.
        mean: Distance in shorter runs, minus that in longer ones.
        low, high: The two-sided 95 % confidence interval.
    """

    method: str
    shorter: str
    longer: str
    n_seeds: int
    mean: float
    low: float
    high: float


def list_shrinkages(find: Find) -> Iterator[Shrinkage]:
    """List what is known of votes of the papers' betas, of short ones, and with the mask."""
    for shorter, longer in PAIRS:
        adamw = choose_recipe("adamw", shorter.partition("-")[0], find).method
        for method in (PAPER, SHORT, CAUTIOUS) if adamw is not None else ():
            assert adamw is not None
            ends = [
                Ending.find(make_cell(setting, name), find)
                for setting in (shorter, longer)
                for name in (method, adamw)
            ]
            if any(end.has_diverged or not end.is_whole for end in ends):
                continue
            seeds = sorted(set.intersection(*(set(end.records) for end in ends)))
            before, adamw_before, after, adamw_after = (
                np.array([end.errors(seed) for seed in seeds]) for end in ends
            )
            by_unit = before - adamw_before - (after - adamw_after)
            mean, (half, _) = float(by_unit.mean()), spread(by_unit)
            yield Shrinkage(method, shorter, longer, len(seeds), mean, mean - half, mean + half)

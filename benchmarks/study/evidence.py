"""Differences between methods, their intervals, and what they decide: the protocol in figures.

Lower outcomes are better. A difference is the method's minus the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from cells import Cell, Choice, Find, choose_rate, reported
from scipy.special import ndtri, stdtrit
from scoring import unpack_units

MARGINS = {"images": 1.0, "text": 0.02}
UNITS = {"images": "points of test error", "text": "nats a byte"}
NOVELS = ("novels", "novels-lora", "novels-long", "novels-long-lora")
"""Tasks of fine-tuning that are scored in nats a token."""
CONFIDENCE = 0.95

Array = npt.NDArray[np.float64]


class Verdict(Enum):
    """What a comparison decides."""

    MATCHES = "matches"
    LEADS = "leads"
    TRAILS = "trails"
    INCONCLUSIVE = "inconclusive"
    OPEN = "not yet run"


@dataclass(frozen=True)
class Ending:
    """How the reported runs of a cell ended.

    Attributes:
        cell: Which one.
        choice: Its tuning.
        records: Of its reported runs, by seed, those that are there.
    """

    cell: Cell
    choice: Choice
    records: Mapping[int, Mapping[str, Any]]

    @classmethod
    def find(cls, cell: Cell, find: Find) -> Ending:
        """Look for the records of a cell."""
        choice = choose_rate(cell, find)
        if choice.rate is None:
            return cls(cell, choice, {})
        found = {run.seed: find(run.name) for run in reported(cell, choice.rate)}
        return cls(cell, choice, {seed: each for seed, each in found.items() if each is not None})

    @property
    def is_whole(self) -> bool:
        """Whether all seeds are there, or where none are wanted, the tuning."""
        if self.cell.is_screened:
            return self.choice.rate is not None
        return set(self.records) >= set(self.cell.seeds)

    @property
    def has_diverged(self) -> bool:
        """Whether a reported run did not come to its end."""
        return any(record["diverged"] for record in self.records.values())

    def errors(self, seed: int) -> Array:
        """Return the outcome of each unit of the test data: 0 or 100, or nats of a block."""
        units = unpack_units(self.records[seed]["test"]["units"])
        is_text = self.cell.setting.task in ("text", *NOVELS)
        return units if is_text else 100 * (1 - units)

    def outcomes(self) -> list[float]:
        """Return the outcome of each seed that came to its end."""
        return [
            float(self.errors(seed).mean())
            for seed, record in sorted(self.records.items())
            if not record["diverged"]
        ]

    @property
    def validation_loss(self) -> float | None:
        """The lowest of all rates; None before the rate is chosen."""
        return None if self.choice.rate is None else self.choice.losses[self.choice.rate]

    @property
    def names(self) -> list[str]:
        """Names of the reported runs."""
        return [record["name"] for _, record in sorted(self.records.items())]


@dataclass(frozen=True)
class Comparison:
    """A method beside a reference.

    Attributes:
        method, reference: Their endings.
        n_seeds: In common.
        mean, deviation: Of the differences by seed; NaN without seeds, deviation with one.
        lower, upper: One-sided 95 % bounds over seeds and over test examples, the wider of the two;
            NaN below two seeds.
        verdict: What follows.
    """

    method: Ending
    reference: Ending
    n_seeds: int
    mean: float
    deviation: float
    lower: float
    upper: float
    verdict: Verdict


def compare(method: Ending, reference: Ending) -> Comparison:
    """Compare two cells of the same task by the protocol."""
    whole = method.is_whole and reference.is_whole
    if whole and method.has_diverged:
        return Comparison(
            method, reference, 0, math.inf, math.nan, math.nan, math.inf, Verdict.TRAILS
        )
    if whole and reference.has_diverged:
        return Comparison(
            method, reference, 0, -math.inf, math.nan, -math.inf, math.nan, Verdict.LEADS
        )
    seeds = [
        seed
        for seed in sorted(set(method.records) & set(reference.records))
        if not (method.records[seed]["diverged"] or reference.records[seed]["diverged"])
    ]
    by_unit = np.array([method.errors(seed) - reference.errors(seed) for seed in seeds])
    if len(seeds) == 0:
        nothing = math.nan
        return Comparison(method, reference, 0, nothing, nothing, nothing, nothing, Verdict.OPEN)
    by_seed = by_unit.mean(axis=1)
    mean = float(by_seed.mean())
    if len(seeds) == 1:
        return Comparison(method, reference, 1, mean, math.nan, math.nan, math.nan, Verdict.OPEN)
    half = half_width(by_unit)
    margin = MARGINS[method.cell.setting.task]
    verdict = decide(mean, half, margin=margin) if whole else Verdict.OPEN
    deviation = float(by_seed.std(ddof=1))
    return Comparison(
        method, reference, len(seeds), mean, deviation, mean - half, mean + half, verdict
    )


def half_width(by_unit: Array) -> float:
    """Return the distance from the mean to a one-sided 95 % bound.

    Args:
        by_unit: (seeds, units) differences, two seeds or more.

    Returns:
        The greater one of Student's over seeds and the normal one over units.
    """
    n_seeds, n_units = by_unit.shape
    over_seeds = by_unit.mean(axis=1).std(ddof=1) / math.sqrt(n_seeds)
    over_units = by_unit.mean(axis=0).std(ddof=1) / math.sqrt(n_units)
    return float(max(stdtrit(n_seeds - 1, CONFIDENCE) * over_seeds, ndtri(CONFIDENCE) * over_units))


def decide(mean: float, half: float, *, margin: float) -> Verdict:
    """Say what a mean difference and its bounds decide."""
    if mean + half < 0:
        return Verdict.LEADS
    if mean + half < margin:
        return Verdict.MATCHES
    return Verdict.TRAILS if mean - half > 0 else Verdict.INCONCLUSIVE


def sampling_error(errors: Sequence[Array]) -> float:
    """Return the standard error over test units of the mean outcome of some seeds."""
    units = np.array(errors).mean(axis=0)
    return float(units.std(ddof=1) / math.sqrt(len(units)))

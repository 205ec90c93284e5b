"""The claims of the papers, each answered by the figures of the study.

Differences are taken seed by seed, then averaged; lower is better. A run that diverged is
infinitely far above all others. What counts as a match was fixed before the runs that answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distlion_lab.report.comparison import Cell, Comparison, Metric, Spread

# Above the reference, in the unit of the outcome: points of test error; nats of test loss.
MATCH = {"points": 1.0, "nats": 0.02}
# Averaging momenta must gain this share of it, for a part of the gain to be asked for; and which.
GAIN = 0.5
RECOVERED = 0.75
GLOBAL = "global-lion"
BASELINES = ("terngrad-adamw", "graddrop-adamw", "dgc")


@dataclass(frozen=True)
class Answer:
    """What one part of the study answers to a claim, with one number of workers.

    Attributes:
        claim: The claim, as a sentence.
        part: Of the study.
        workers: Their number.
        figures: What was found, in words.
        holds: Whether the claim holds there; None where it has no object.
        seeds: For how many seeds it does, such as "2 of 3"; empty where it is not asked of one.
    """

    claim: str
    part: str
    workers: int
    figures: str
    holds: bool | None
    seeds: str = ""


class Endings:
    """How the methods of a part ended with one number of workers."""

    def __init__(self, part: str, comparison: Comparison, workers: int) -> None:
        self.part = part
        self.workers = workers
        self._metric: Metric = comparison.outcome
        self._unit = "points" if comparison.is_classification else "nats"
        self.match = MATCH[self._unit]
        self._cells = {name: comparison.cell(name, workers) for name in comparison.methods}
        settings = comparison.settings
        names = ("task", "data", "partition", "alpha", "steps", "lrs", "seeds")
        self.conditions = tuple(settings.get(name) for name in names)

    def have(self, *methods: str) -> bool:
        """Return whether all of these were compared."""
        return all(method in self._cells for method in methods)

    def bits(self, method: str) -> float:
        """Return the bits up and down for each parameter and step; NaN if all runs diverged."""
        cell = self._cells[method]
        return cell.bits_per_parameter if cell.finished else math.nan

    def minus(self, method: str, reference: str) -> list[float]:
        """Return the differences of the final outcomes, seed by seed."""
        ours, theirs = self._read(self._cells[method]), self._read(self._cells[reference])
        return [ours.get(seed, math.inf) - theirs.get(seed, math.inf) for seed in ours | theirs]

    def _read(self, cell: Cell) -> dict[int, float]:
        return {
            record["settings"]["seed"]: self._metric.read(record)[-1]
            if record["diverged"] is None
            else math.inf
            for record in cell.records
        }

    def compare(
        self, claim: str, method: str, reference: str, *, margin: float | None = None
    ) -> Answer:
        """Answer whether a method ends below a reference, or no more than a margin above it."""
        differences = self.minus(method, reference)
        figures = f"{method} - {reference}: {self.format(differences)}"
        edges = [name for name in (method, reference) if self._cells[name].is_at_edge]
        if edges:
            figures += f"; lr at the edge of the grid: {', '.join(edges)}"

        def holds(difference: float) -> bool:
            return difference < 0 if margin is None else difference <= margin

        seeds = f"{sum(map(holds, differences))} of {len(differences)}"
        return self.answer(claim, figures, holds(mean_of(differences)), seeds)

    def answer(self, claim: str, figures: str, holds: bool | None, seeds: str = "") -> Answer:
        """Answer with what was found here."""
        return Answer(claim, self.part, self.workers, figures, holds, seeds)

    def format(self, differences: Sequence[float]) -> str:
        """Write mean and standard deviation of differences with their unit."""
        mean, digits = mean_of(differences), 2 if self._unit == "points" else 4
        if not math.isfinite(mean):
            return f"{mean:+} {self._unit} (diverged)"
        return f"{mean:+.{digits}f} ± {Spread.of(differences).sd:.{digits}f} {self._unit}"


def mean_of(differences: Sequence[float]) -> float:
    """Average over seeds; infinite where one of the two diverged, NaN where both did."""
    return math.fsum(differences) / len(differences) if differences else math.nan


def _ask_match(method: str, name: str) -> Callable[[Endings], Iterator[Answer]]:
    def ask(endings: Endings) -> Iterator[Answer]:
        if endings.have(method, GLOBAL):
            claim = f"{name} matches global Lion"
            yield endings.compare(claim, method, GLOBAL, margin=endings.match)

    return ask


def _ask_baselines(endings: Endings) -> Iterator[Answer]:
    for method in ("majority", "average"):
        for baseline in BASELINES:
            if endings.have(method, baseline):
                ours, theirs = endings.bits(method), endings.bits(baseline)
                answer = endings.compare(
                    f"{method} leads {baseline} at no more traffic", method, baseline
                )
                figures = f"{answer.figures}; {ours:.3g} bits against {theirs:.3g}"
                holds = None if ours > theirs else answer.holds
                yield replace(answer, figures=figures, holds=holds)


def _ask_norms(endings: Endings) -> Iterator[Answer]:
    for bits in (2, 4):
        l1, linf = f"quantized-{bits}", f"quantized-{bits}-linf"
        if endings.have(l1, linf):
            yield endings.compare("votes of p bits do better with L1 than L-infinity", l1, linf)


def _ask_more_bits(endings: Endings) -> Iterator[Answer]:
    for fewer, more in (("majority", "quantized-2"), ("quantized-2", "quantized-4")):
        if endings.have(fewer, more):
            yield endings.compare("votes of more bits end lower", more, fewer)


def _ask_bits(endings: Endings) -> Iterator[Answer]:
    """Ask with which number of bits a vote matches global Lion."""
    votes = {"1": "majority", "2": "quantized-2", "4": "quantized-4"}
    if not endings.have(GLOBAL, *votes.values()):
        return
    above = {bits: endings.minus(method, GLOBAL) for bits, method in votes.items()}
    enough = [bits for bits, found in above.items() if mean_of(found) <= endings.match]
    figures = f"above {GLOBAL}: " + ", ".join(
        f"p = {bits} {endings.format(found)}" for bits, found in above.items()
    )
    figures += f"; enough: {'p = ' + enough[0] if enough else 'none'}"
    claim = "votes of p bits close the gap between one bit and global Lion"
    yield endings.answer(claim, figures, None if "1" in enough else bool(enough))


def _ask_subset(endings: Endings) -> Iterator[Answer]:
    every, none = "majority-sync-10", "majority"
    for some in (f"{every}-attention", f"{every}-auto"):
        if endings.have(every, some, none):
            yield _compare_subset(endings, every=every, some=some, none=none)


def _compare_subset(endings: Endings, *, every: str, some: str, none: str) -> Answer:
    gains = endings.minus(none, every), endings.minus(none, some)
    bits = endings.bits(none)
    share = (endings.bits(some) - bits) / (endings.bits(every) - bits)
    figures = (
        f"gained by all {endings.format(gains[0])}, by {some} {endings.format(gains[1])} "
        f"with {share:.0%} of the momenta's bits"
    )
    claim = "averaging the momenta of some parameters recovers what averaging all does"
    of_all, of_some = map(mean_of, gains)
    is_gain = of_all > GAIN * endings.match
    return endings.answer(claim, figures, of_some >= RECOVERED * of_all if is_gain else None)


def _ask_momenta(endings: Endings) -> Iterator[Answer]:
    if endings.have("majority", "majority-sync-10"):
        claim = "averaging momenta once in 10 steps helps a majority vote"
        yield endings.compare(claim, "majority-sync-10", "majority")
    if endings.have("quantized-2", "lion-cub"):
        claim = "averaging momenta once in 100 steps, as Lion Cub does, helps votes of two bits"
        yield endings.compare(claim, "lion-cub", "quantized-2")


def _ask_ties(endings: Endings) -> Iterator[Answer]:
    if endings.have("majority", "majority-zero") and endings.workers % 2 == 0:
        claim = "random tie-breaking is better than no update"
        yield endings.compare(claim, "majority", "majority-zero")


QUESTIONS: Sequence[Callable[[Endings], Iterator[Answer]]] = (
    _ask_match("majority", "Majority vote"),
    _ask_match("average", "Average"),
    _ask_match("majority-zero", "Majority vote with ties as 0"),
    _ask_match("lion-cub", "Lion Cub"),
    _ask_baselines,
    _ask_norms,
    _ask_more_bits,
    _ask_bits,
    _ask_subset,
    _ask_momenta,
    _ask_ties,
)


def answer_all(parts: Mapping[str, Comparison]) -> dict[str, list[Answer]]:
    """Answer every claim wherever its methods were compared.

    Args:
        parts: By name. Where they have runs in common, the first answers.

    Returns:
        For each claim, its answers in the order of the parts and numbers of workers.
    """
    places = [
        Endings(name, comparison, workers)
        for name, comparison in parts.items()
        for workers in comparison.workers
    ]
    answers: dict[str, list[Answer]] = {}
    seen: set[tuple[object, ...]] = set()
    for ask in QUESTIONS:
        for place in places:
            for answer in ask(place):
                runs = (place.conditions, place.workers, answer.claim, answer.figures)
                if runs not in seen:
                    seen.add(runs)
                    answers.setdefault(answer.claim, []).append(answer)
    return answers


def sum_up(answers: Sequence[Answer]) -> str:
    """Count in how many of the cases that have an object a claim holds."""
    asked = [answer for answer in answers if answer.holds is not None]
    held = sum(bool(answer.holds) for answer in asked)
    if not asked:
        return "has no object here"
    if held in (0, len(asked)):
        return f"{'holds' if held else 'does not hold'} here ({held} of {len(asked)})"
    return f"holds in {held} of {len(asked)} cases"

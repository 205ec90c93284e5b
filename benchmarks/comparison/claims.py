"""The claims of the papers, each answered by the figures of the study.

Differences are taken seed by seed, then averaged; lower is better. What counts as a par was fixed
before any run was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from distlion.report.comparison import Comparison

# Above the reference, in the unit of the outcome: points of test error; nats of test loss.
PAR = {"images": 1.0, "text": 0.02}
# Of what averaging all momenta gains.
RECOVERED = 0.75
GLOBAL = "global-lion"
RIVALS = ("terngrad-adamw", "graddrop-adamw", "dgc")


@dataclass(frozen=True)
class Answer:
    """What one part of the study says of a claim, with one number of workers.

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


@dataclass(frozen=True)
class Ending:
    """How a method ended with a number of workers: outcomes by seed, and its bits."""

    outcomes: Mapping[int, float]
    bits: float

    def minus(self, other: Ending) -> list[float]:
        """Return the differences of the seeds that both have."""
        shared = sorted(self.outcomes.keys() & other.outcomes.keys())
        return [self.outcomes[seed] - other.outcomes[seed] for seed in shared]


class Endings:
    """How the methods of a part ended, for one number of workers, less those that diverged."""

    def __init__(self, name: str, comparison: Comparison, workers: int) -> None:
        self.part = name
        self.workers = workers
        self.task = str(comparison.settings["task"])
        self.unit = "points" if comparison.is_classification else "nats"
        self.par = PAR[self.task]
        self._by_method: dict[str, Ending] = {}
        for method in comparison.methods:
            cell = comparison.cell(method, workers)
            if cell.finished:
                outcomes = {
                    record["settings"]["seed"]: comparison.outcome.read(record)[-1]
                    for record in cell.finished
                }
                self._by_method[method] = Ending(outcomes, cell.bits_per_parameter)

    def __contains__(self, method: str) -> bool:
        return method in self._by_method

    def __getitem__(self, method: str) -> Ending:
        return self._by_method[method]

    def have(self, *methods: str) -> bool:
        """Return whether all of these are there."""
        return all(method in self for method in methods)

    def compare(
        self, claim: str, method: str, reference: str, *, margin: float = 0.0, note: str = ""
    ) -> Answer:
        """Answer whether a method ends no more than a margin above a reference."""
        differences = self[method].minus(self[reference])
        mean = fmean(differences)
        figures = f"{method} - {reference}: {mean:+.{self._digits}f} {self.unit}{note}"
        agree = sum(difference <= margin for difference in differences)
        seeds = f"{agree} of {len(differences)}"
        return Answer(claim, self.part, self.workers, figures, mean <= margin, seeds)

    @property
    def _digits(self) -> int:
        return 2 if self.task == "images" else 3

    def format(self, value: float) -> str:
        """Write a difference with its unit."""
        return f"{value:+.{self._digits}f} {self.unit}"


def _ask_par(method: str, name: str) -> Callable[[Endings], Iterator[Answer]]:
    def ask(endings: Endings) -> Iterator[Answer]:
        if endings.have(method, GLOBAL):
            claim = f"{name} is on a par with global Lion"
            yield endings.compare(claim, method, GLOBAL, margin=endings.par)

    return ask


def _ask_rivals(endings: Endings) -> Iterator[Answer]:
    for method in ("majority", "average"):
        for rival in RIVALS:
            if endings.have(method, rival):
                ours, theirs = endings[method].bits, endings[rival].bits
                claim = f"{method} is ahead of {rival} at no more traffic"
                note = f"; {ours:.3g} bits against {theirs:.3g}"
                answer = endings.compare(claim, method, rival, note=note)
                yield answer if ours <= theirs else _refuse(answer)


def _refuse(answer: Answer) -> Answer:
    return Answer(answer.claim, answer.part, answer.workers, answer.figures, False, answer.seeds)


def _ask_norms(endings: Endings) -> Iterator[Answer]:
    for bits in (2, 4):
        l1, linf = f"quantized-{bits}", f"quantized-{bits}-linf"
        if endings.have(l1, linf):
            yield endings.compare("votes of p bits do better with L1 than L-infinity", l1, linf)


def _ask_bits(endings: Endings) -> Iterator[Answer]:
    """Ask with which number of bits a vote is on a par with global Lion."""
    votes = {"1": "majority", "2": "quantized-2", "4": "quantized-4"}
    if not endings.have(GLOBAL, *votes.values()):
        return
    above = {bits: fmean(endings[method].minus(endings[GLOBAL])) for bits, method in votes.items()}
    enough = next((bits for bits, mean in above.items() if mean <= endings.par), None)
    figures = "above global-lion: " + ", ".join(
        f"p = {bits} {endings.format(mean)}" for bits, mean in above.items()
    )
    figures += f"; enough: {'p = ' + enough if enough else 'none'}"
    claim = "votes of p bits close the gap between one bit and global Lion"
    has_gap = above["1"] > endings.par
    yield Answer(claim, endings.part, endings.workers, figures, bool(enough) if has_gap else None)


def _ask_subset(endings: Endings) -> Iterator[Answer]:
    every, none = "majority-sync-10", "majority"
    for some in (f"{every}-attention", f"{every}-auto"):
        if endings.have(every, some, none):
            yield _compare_subset(endings, every=every, some=some, none=none)


def _compare_subset(endings: Endings, *, every: str, some: str, none: str) -> Answer:
    gain_of_all = fmean(endings[none].minus(endings[every]))
    gain_of_some = fmean(endings[none].minus(endings[some]))
    share = (endings[some].bits - endings[none].bits) / (endings[every].bits - endings[none].bits)
    figures = (
        f"gained by all {endings.format(gain_of_all)}, by {some} {endings.format(gain_of_some)} "
        f"with {share:.0%} of the momenta's bits"
    )
    claim = "averaging the momenta of some parameters recovers what averaging all does"
    is_gain = gain_of_all > endings.par / 2
    holds = gain_of_some >= RECOVERED * gain_of_all if is_gain else None
    return Answer(claim, endings.part, endings.workers, figures, holds)


def _ask_momenta(endings: Endings) -> Iterator[Answer]:
    for rule in ("majority", "quantized-2"):
        if endings.have(rule, f"{rule}-sync-10"):
            claim = "averaging momenta once in 10 steps helps"
            yield endings.compare(claim, f"{rule}-sync-10", rule)


def _ask_ties(endings: Endings) -> Iterator[Answer]:
    if endings.have("majority", "majority-zero") and endings.workers % 2 == 0:
        claim = "a coin on a tie is better than no update"
        yield endings.compare(claim, "majority", "majority-zero")


QUESTIONS: Sequence[Callable[[Endings], Iterator[Answer]]] = (
    _ask_par("majority", "Majority vote"),
    _ask_par("average", "Average"),
    _ask_par("majority-zero", "Majority vote with ties as 0"),
    _ask_rivals,
    _ask_norms,
    _ask_bits,
    _ask_subset,
    _ask_momenta,
    _ask_ties,
)


def answer_all(parts: Mapping[str, Comparison]) -> list[Answer]:
    """Answer every claim wherever its methods were compared, claim by claim."""
    places = [
        Endings(name, comparison, workers)
        for name, comparison in parts.items()
        for workers in comparison.workers
    ]
    asked = [answer for ask in QUESTIONS for place in places for answer in ask(place)]
    # Parts that share runs give the same answer twice.
    answers = list({replace(answer, part=""): answer for answer in reversed(asked)}.values())[::-1]
    order = {answer.claim: k for k, answer in reversed(list(enumerate(answers)))}
    return sorted(answers, key=lambda answer: order[answer.claim])


def sum_up(answers: Sequence[Answer]) -> str:
    """Say in how many of the cases that have an object a claim holds."""
    asked = [answer for answer in answers if answer.holds is not None]
    held = sum(bool(answer.holds) for answer in asked)
    if not asked:
        return "has no object here"
    if held in (0, len(asked)):
        return f"{'holds' if held else 'does not hold'} here ({held} of {len(asked)})"
    return f"holds in {held} of {len(asked)} cases"

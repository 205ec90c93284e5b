"""What the study decides for the library, by rules that the protocol fixed before their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from claims import Study
from evidence import Comparison, Verdict
from plan import SHORT

# Points of test error: half of what betas (0.9, 0.95) were ahead by in a third of the steps.
LEAST_AT_LENGTH = 2.4


@dataclass(frozen=True)
class Condition:
    """A part of a rule.

    Attributes:
        text: What must hold.
        holds: Whether it does; None before its runs.
    """

    text: str
    holds: bool | None


@dataclass(frozen=True)
class Decision:
    """A question and all that must hold for a yes.

    Attributes:
        question: What is decided.
        conditions: One that does not hold makes it a no.
    """

    question: str
    conditions: tuple[Condition, ...]

    @property
    def answer(self) -> str:
        """``yes``, ``no`` or ``not yet``."""
        found = [each.holds for each in self.conditions]
        if False in found:
            return "no"
        return "not yet" if None in found else "yes"


def list_decisions(study: Study) -> Iterator[Decision]:
    """Yield what is asked, and what the records say."""
    yield Decision(
        "Do betas become (0.9, 0.95) by default?",
        (
            *_all_ahead(study, SHORT, "majority", ("confirmation", "images-8", "text-8")),
            *_all_ahead(study, SHORT, "majority", ("images-32", "skew")),
            _is_far_ahead(study.compare("confirmation", SHORT, "majority")),
        ),
    )
    most_skewed = [
        each
        for each in study.compare("skew", "shared-majority", SHORT)
        if each.method.cell.alpha == 0.1
    ]
    yield Decision(
        "Does momentum after the vote become an option?",
        (
            _is_ahead(f"ahead of {SHORT} at alpha 0.1", most_skewed),
            _is_ahead(
                "the same at rates tuned on skewed classes",
                study.compare("skew-tuned", "shared-majority", SHORT),
            ),
        ),
    )


def _all_ahead(
    study: Study, method: str, reference: str, parts: Sequence[str]
) -> Iterator[Condition]:
    for part in parts:
        yield _is_ahead(f"{part}: ahead", study.compare(part, method, reference))


def _is_ahead(text: str, found: Sequence[Comparison]) -> Condition:
    """Ask for ``ahead`` in each of some comparisons."""
    verdicts = {each.verdict for each in found}
    if verdicts - {Verdict.AHEAD, Verdict.OPEN}:
        return Condition(text, holds=False)
    return Condition(text, holds=None if Verdict.OPEN in verdicts else True)


def _is_far_ahead(found: Sequence[Comparison]) -> Condition:
    (comparison,) = found
    known = comparison.verdict is not Verdict.OPEN
    return Condition(
        f"confirmation: mean at least {LEAST_AT_LENGTH:g} points ahead",
        holds=comparison.mean <= -LEAST_AT_LENGTH if known else None,
    )

"""What the study decides for the library, by rules that the protocol fixed before their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from claims import Study
from evidence import Comparison, Verdict
from plan import FEEDBACK, SHORT

# Points of test error: half of what betas (0.9, 0.95) led by in a third of the steps.
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
            *_all_lead(study, SHORT, "majority", ("confirmation", "images-8", "text-8")),
            *_all_lead(study, SHORT, "majority", ("images-32", "skew")),
            _leads_far(study.compare("confirmation", SHORT, "majority")),
        ),
    )
    yield Decision(
        "Does momentum after the vote become an option?",
        (
            _leads(
                f"leads {SHORT} at alpha 0.1",
                _skewed(study, "shared-majority", SHORT, alpha=0.1),
            ),
            _leads(
                "the same at rates tuned on skewed classes",
                study.compare("skew-tuned", "shared-majority", SHORT),
            ),
        ),
    )
    averaged = "majority-sync-10"
    yield Decision(
        "Does error feedback become a rule?",
        (
            _leads(
                f"leads {averaged} at alpha 0.1, at rates tuned there",
                study.compare("skew-tuned", FEEDBACK, averaged),
            ),
            _leads(
                f"leads or matches {averaged} at alpha 1",
                _skewed(study, FEEDBACK, averaged, alpha=1.0),
                Verdict.MATCHES,
            ),
        ),
    )


def _all_lead(
    study: Study, method: str, reference: str, parts: Sequence[str]
) -> Iterator[Condition]:
    for part in parts:
        yield _leads(f"{part}: leads", study.compare(part, method, reference))


def _skewed(study: Study, method: str, reference: str, *, alpha: float) -> list[Comparison]:
    found = study.compare("skew", method, reference)
    return [each for each in found if each.method.cell.alpha == alpha]


def _leads(text: str, found: Sequence[Comparison], *enough: Verdict) -> Condition:
    """Ask for ``leads``, or what is enough, in each of some comparisons."""
    verdicts = {each.verdict for each in found}
    if verdicts - {Verdict.LEADS, Verdict.OPEN, *enough}:
        return Condition(text, holds=False)
    return Condition(text, holds=None if not found or Verdict.OPEN in verdicts else True)


def _leads_far(found: Sequence[Comparison]) -> Condition:
    (comparison,) = found
    known = comparison.verdict is not Verdict.OPEN
    return Condition(
        f"confirmation: mean at least {LEAST_AT_LENGTH:g} points of lead",
        holds=comparison.mean <= -LEAST_AT_LENGTH if known else None,
    )

"""Votes by name: every rule with the momenta of Lion, and Signum, which has other momenta."""

from __future__ import annotations

from dataclasses import dataclass

from distlion.aggregation import RULES, Aggregation, Average, MajorityVote, list_rule_names

LION_BETAS = (0.9, 0.99)
_SIGNUM_BETAS = (0.9, 0.9)
_SIGNSGD_BETAS = (0.0, 0.0)


@dataclass(frozen=True)
class NamedVote:
    """A rule, and the momenta that it votes on.

    Attributes:
        rule: The rule.
        betas: Weights of the momentum; (0, 0) votes on gradients.
        description: A phrase for reports.
    """

    rule: Aggregation
    betas: tuple[float, float]
    description: str


_SIGNUM = {
    "signum": NamedVote(
        MajorityVote(), _SIGNUM_BETAS, "Signum with majority vote (arXiv:1810.05291)"
    ),
    "signum-average": NamedVote(Average(), _SIGNUM_BETAS, "Signum with the average of the signs"),
    "signsgd": NamedVote(
        MajorityVote(), _SIGNSGD_BETAS, "signSGD with majority vote (arXiv:1810.05291)"
    ),
}


def find_vote(name: str) -> NamedVote | None:
    """Return the vote of a name; None if there is none."""
    named = RULES.get(name)
    if named is not None:
        return NamedVote(named.rule, LION_BETAS, named.description)
    return _SIGNUM.get(name)


def list_vote_names() -> list[str]:
    """Return the names for messages and help; P is a number of bits."""
    return [*list_rule_names(), *_SIGNUM]

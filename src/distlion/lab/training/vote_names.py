"""Votes by name: every rule with the momenta of Lion or others, and Signum, which has its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distlion.aggregation import RULES, Aggregation, Average, MajorityVote, list_rule_names

LION_BETAS = (0.9, 0.99)
ADAMW_BETAS = (0.9, 0.999)
MEANS_WITH_BETAS = ("global-lion", "global-adamw")
"""What averages gradients and may have betas in its name."""
_CAUTIOUS = "-cautious"
# A third digit is never 0: each pair of betas has one name.
_DIGITS = r"\d\d[1-9]?"
_BETAS = re.compile(rf"(?P<base>.+)-betas-(?P<first>{_DIGITS})-(?P<second>{_DIGITS})")
_SIGNUM_BETAS = (0.9, 0.9)
_SIGNSGD_BETAS = (0.0, 0.0)


@dataclass(frozen=True)
class NamedVote:
    """A rule, and the momenta that it votes on.

    Attributes:
        rule: The rule.
        betas: Weights of the momentum; (0, 0) votes on gradients.
        description: A phrase for reports.
        cautious: Mask directions whose sign is not that of the gradient.
        is_ours: Whether it is Distributed Lion; Signum and signSGD, which are its rule with other
            momenta, are methods of others.
    """

    rule: Aggregation
    betas: tuple[float, float]
    description: str
    is_ours: bool = True
    cautious: bool = False


_SIGNUM = {
    "signum": NamedVote(
        MajorityVote(),
        _SIGNUM_BETAS,
        "Signum with majority vote (arXiv:1810.05291)",
        is_ours=False,
    ),
    "signum-average": NamedVote(
        Average(), _SIGNUM_BETAS, "Signum with the average of the signs", is_ours=False
    ),
    "signsgd": NamedVote(
        MajorityVote(),
        _SIGNSGD_BETAS,
        "signSGD with majority vote (arXiv:1810.05291)",
        is_ours=False,
    ),
}


def find_vote(name: str) -> NamedVote | None:
    """Return the vote of a name; None if there is none."""
    if name in _SIGNUM:
        return _SIGNUM[name]
    rest, betas = split_betas(name)
    base, cautious = split_cautious(rest)
    named = RULES.get(base)
    if named is None:
        return None
    description = describe_variant(named.description, cautious, betas)
    return NamedVote(named.rule, betas or LION_BETAS, description, cautious=cautious)


def split_cautious(name: str) -> tuple[str, bool]:
    """Take the word for masked directions from the end of a name: ``majority-cautious``."""
    base = name.removesuffix(_CAUTIOUS)
    return base, base != name


def describe_variant(description: str, cautious: bool, betas: tuple[float, float] | None) -> str:
    """Add to the description of a method what its name says of directions and momenta."""
    if cautious:
        description += ", cautious (arXiv:2411.16085)"
    return description if betas is None else f"{description}, betas {betas}"


def split_betas(name: str) -> tuple[str, tuple[float, float] | None]:
    """Take betas from the end of a name: ``majority-betas-90-95`` has (0.9, 0.95).

    The numbers are two or three digits behind the decimal point.

    Returns:
        The rest of the name, and the betas; None where it says nothing of them.
    """
    match = _BETAS.fullmatch(name)
    if match is None:
        return name, None
    return match["base"], (float(f"0.{match['first']}"), float(f"0.{match['second']}"))


def describe_betas(name: str) -> str:
    """Return what an unknown name with betas must look like, to be added to its error; or ""."""
    if "-betas-" not in name:
        return ""
    return (
        "; betas are digits behind the point, two or three of them, 90-95 for (0.9, 0.95); they "
        f"stand behind a rule, {' or '.join(MEANS_WITH_BETAS)} and before -sync-K"
    )


def list_plain_votes() -> list[str]:
    """Return every name without betas, each number of bits a name of its own."""
    return [*RULES, *(f"{name}{_CAUTIOUS}" for name in RULES), *_SIGNUM]


def list_vote_names() -> list[str]:
    """Return the names for messages and help: P is a number of bits, A and B digits of betas."""
    variants = ("RULE-cautious", "RULE-betas-A-B", "RULE-cautious-betas-A-B")
    return [*list_rule_names(), *variants, *_SIGNUM]

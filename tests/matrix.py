"""The rules and patterns that tests run over: all that the registries know, and variants of them.

A rule or pattern that joins its registry joins every exam that enumerates these tables. A new class
of rules needs one more line here: what the oracle calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distlion.wire.registry
from delta_oracle import DeltaRule
from distlion.votes import RULES as NAMED_RULES
from distlion.votes import (
    SCALED_RULES,
    Aggregation,
    Average,
    MajorityVote,
    MaskedVote,
    QuantizedVote,
    ResidualVote,
    ScaledVote,
)
from distlion.votes.estimate import EstimateVote
from distlion.votes.feedback import FeedbackVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.stochastic import StochasticVote
from distlion.votes.ternary import TernaryVote
from distlion.wire import Exchange
from oracle import Rule

NAMES = tuple(NAMED_RULES)
"""Every name of a rule."""

LISTED: dict[str, Aggregation] = {
    name: named.rule for name, named in NAMED_RULES.items() if named.listed
}
"""Rules by name, without the numbers of bits in between: for tests that take long."""

VARIANTS: dict[str, Aggregation] = {
    "quantized-3-wide": QuantizedVote(bits=3, step=0.9),
    "quantized-8-linf-narrow": QuantizedVote(bits=8, norm="linf", step=0.001),
}
"""Rules that no name stands for."""

RULES: dict[str, Aggregation] = {
    **{name: named.rule for name, named in NAMED_RULES.items()},
    **VARIANTS,
}
"""Every rule."""

PATTERNS: dict[str, Exchange] = dict(distlion.wire.registry.PATTERNS)
"""Every pattern."""

PATTERNS_OF_ALL_RULES = {
    name: pattern for name, pattern in PATTERNS.items() if not pattern.counts_in_parts
}
"""Those that carry votes of every rule, and floats: they do not count in parts."""


def carries(pattern: Exchange, rule: Aggregation) -> bool:
    """Return whether votes by a rule can travel by a pattern."""
    return not pattern.counts_in_parts or rule.vote_format.has_partial_sums


ORACLES: dict[type[Aggregation], Callable[[Any], Rule]] = {
    MajorityVote: lambda rule: Rule("majority", tie=rule.tie),
    TernaryVote: lambda rule: Rule("ternary"),
    MaskedVote: lambda rule: Rule("masked", tie=rule.tie),
    Average: lambda rule: Rule("average"),
    QuantizedVote: lambda rule: Rule(
        "quantized", bits=rule.bits, norm=rule.norm, step=rule.level_width
    ),
    FeedbackVote: lambda rule: Rule("feedback", bits=rule.bits),
    FullPrecision: lambda rule: Rule("full", dtype=str(rule.dtype).removeprefix("torch.")),
}
"""For each class of rules, the oracle's account of one."""


DELTA_RULES: dict[str, Aggregation] = dict(SCALED_RULES)
"""Every rule for the deltas of local steps."""

DELTA_ORACLES: dict[type[Aggregation], str] = {
    ScaledVote: "scaled",
    StochasticVote: "stochastic",
    ResidualVote: "residual",
    EstimateVote: "estimate",
}
"""For each class of them, what their oracle calls it."""


def first_of_each_class() -> list[str]:
    """Return a name for each class of rules: for tests that start processes for each of them."""
    names: dict[type[Aggregation], str] = {}
    for name, rule in LISTED.items():
        names.setdefault(type(rule), name)
    return list(names.values())


def describe_for_oracle(rule: Aggregation) -> Rule:
    """Say a rule in the oracle's words."""
    return ORACLES[type(rule)](rule)


def describe_delta_rule(rule: Aggregation) -> DeltaRule:
    """Say a rule for deltas in their oracle's words."""
    return DeltaRule(DELTA_ORACLES[type(rule)], bits=getattr(rule, "bits", 1))

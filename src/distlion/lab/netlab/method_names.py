"""The methods that a sweep compares, by name: baselines, and the rules and patterns of distlion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distlion.aggregation import RULES
from distlion.errors import InvalidArgumentError
from distlion.exchange import PATTERNS, Exchange
from distlion.lab.names import suggest

FLOOR = "none"
DDP_FP32 = "ddp-fp32"
DDP_FP16 = "ddp-fp16"
DDP_POWERSGD = "ddp-powersgd"
BASELINES = (DDP_FP32, DDP_FP16, DDP_POWERSGD)
"""All-reduces of gradients by DistributedDataParallel, then Lion."""

ALL_REDUCE = "all-reduce-fp32"
"""Only of a vector: the all-reduce itself, without an optimizer."""

AUTO = "auto"
_OVERLAP = "-overlap"
_OVERLAP_AUTO = "-overlap-auto"


@dataclass(frozen=True)
class VoteMethod:
    """One of ours.

    Args:
        rule: Name of the rule.
        pattern: Name of the pattern, or "auto".
        overlap: Whether votes leave during backward; "auto" for what its first steps find faster.
    """

    rule: str
    pattern: str
    overlap: bool | Literal["auto"]

    @property
    def exchange(self) -> Exchange | Literal["auto"]:
        """What ``DistributedLion`` takes for the pattern."""
        return "auto" if self.pattern == AUTO else PATTERNS[self.pattern]

    @property
    def adapts(self) -> bool:
        """Whether its construction measures the link, so that every rate needs one of its own."""
        return bool(self.overlap) or self.pattern == AUTO


def list_patterns() -> list[str]:
    """Return the names of the patterns, and "auto"."""
    return [*PATTERNS, AUTO]


def parse_vote_method(name: str) -> VoteMethod:
    """Read ``RULE-PATTERN``, ``RULE-PATTERN-overlap`` or ``RULE-PATTERN-overlap-auto``.

    Raises:
        InvalidArgumentError: There is no such rule or pattern.
    """
    overlap: bool | Literal["auto"] = (
        "auto" if name.endswith(_OVERLAP_AUTO) else name.endswith(_OVERLAP)
    )
    base = name.removesuffix(_OVERLAP_AUTO).removesuffix(_OVERLAP)
    for pattern in list_patterns():
        rule = base.removesuffix(f"-{pattern}")
        if rule != base and rule in RULES:
            return VoteMethod(rule, pattern, overlap)
    votes = [f"{rule}-{pattern}" for rule in RULES for pattern in list_patterns()]
    known = [FLOOR, *BASELINES, *votes, *(f"{vote}{_OVERLAP}" for vote in votes)]
    raise InvalidArgumentError(
        f"method {name!r} is unknown; {suggest(name, known, all_in='distlion netlab sweep --help')}"
    )


def is_baseline(name: str) -> bool:
    """Whether a method is the floor or a baseline, not one of ours."""
    return name in (FLOOR, ALL_REDUCE, *BASELINES)


def adapts(name: str) -> bool:
    """Whether a method must be built anew for every rate."""
    return not is_baseline(name) and parse_vote_method(name).adapts

"""Names of the methods in a sweep: baselines, and the rules and patterns of distlion."""

from __future__ import annotations

import re
from typing import Literal

from distlion.errors import InvalidArgumentError
from distlion.votes import RULES
from distlion.wire import PATTERNS
from distlion_lab.baselines.base import Compression
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.names import suggest
from distlion_lab.training.workers import AUTO, VoteOptions, find_exchange

FLOOR = "none"
DDP_FP32 = "ddp-fp32"
DDP_FP16 = "ddp-fp16"
DDP_POWERSGD = "ddp-powersgd"
BASELINES: dict[str, Compression | PowerSGD | None] = {
    DDP_FP32: None,
    DDP_FP16: HalfPrecision(),
    DDP_POWERSGD: PowerSGD(),
}
"""Baselines: DistributedDataParallel averages gradients, compressed or not, for Lion."""

ALL_REDUCE = "all-reduce-fp32"
"""Method of a bare vector: the all-reduce itself, without an optimizer."""

_WIRES = ("gloo", "tcp")
_LOCAL = re.compile(r"local-([2-9]|[1-9]\d+)")
_OVERLAP = "-overlap"
_OVERLAP_AUTO = "-overlap-auto"


def list_patterns() -> list[str]:
    """Return the names of the patterns, and "auto"."""
    return [*PATTERNS, AUTO]


def parse_vote(name: str) -> VoteOptions:
    """Read ``RULE-PATTERN``, ``RULE-PATTERN-overlap`` or ``RULE-PATTERN-overlap-auto``.

    A transport may follow, such as ``-gloo``; ``find_wire`` reads it.

    Returns:
        Rule, exchange and overlap.

    Raises:
        InvalidArgumentError: There is no such rule or pattern.
    """
    wire = find_wire(name)
    vote = name if wire is None else name.removesuffix(f"-{wire}")
    overlap: bool | Literal["auto"] = (
        "auto" if vote.endswith(_OVERLAP_AUTO) else vote.endswith(_OVERLAP)
    )
    base = vote.removesuffix(_OVERLAP_AUTO).removesuffix(_OVERLAP)
    for pattern in list_patterns():
        rule = base.removesuffix(f"-{pattern}")
        if rule != base and rule in RULES:
            return VoteOptions(
                aggregation=RULES[rule].rule, exchange=find_exchange(pattern), overlap=overlap
            )
    votes = [f"{rule}-{pattern}" for rule in RULES for pattern in list_patterns()]
    known = [FLOOR, *BASELINES, "local-8", *votes, *(f"{vote}{_OVERLAP}" for vote in votes)]
    raise InvalidArgumentError(
        f"method {name!r} is unknown; {suggest(name, known, all_in='distlion netlab sweep --help')}"
    )


def find_wire(name: str) -> str | None:
    """Return the transport of votes that a method's name ends with; None for the default one."""
    return next((wire for wire in _WIRES if name.endswith(f"-{wire}")), None)


def find_period(name: str) -> int:
    """Return the steps of one vote: K of ``local-K``, local steps of AdamW; 1 of other methods."""
    match = _LOCAL.fullmatch(name)
    return int(match[1]) if match else 1


def is_baseline(name: str) -> bool:
    """Return True for the floor and for baselines; False for methods that vote."""
    return name in (FLOOR, ALL_REDUCE, *BASELINES)


def adapts(name: str) -> bool:
    """Return True if a method measures the link when built, so that each rate needs a new one."""
    if is_baseline(name) or find_period(name) > 1:
        return False
    options = parse_vote(name)
    return bool(options["overlap"]) or options["exchange"] == "auto"

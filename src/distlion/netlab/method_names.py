"""The methods that a sweep compares, by name: rivals, and the rules and patterns of distlion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from distlion.aggregation import (
    Aggregation,
    Average,
    FullPrecision,
    MajorityVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.errors import InvalidArgumentError
from distlion.exchange import AllGather, AllReduce, Exchange, ParameterServer

FLOOR = "none"
DDP_FP32 = "ddp-fp32"
DDP_FP16 = "ddp-fp16"
DDP_POWERSGD = "ddp-powersgd"
RIVALS = (DDP_FP32, DDP_FP16, DDP_POWERSGD)
"""All-reduces of gradients by DistributedDataParallel, then Lion."""

ALL_REDUCE = "all-reduce-fp32"
"""Only of a vector: the all-reduce itself, without an optimizer."""

RULES: Mapping[str, Callable[[], Aggregation]] = {
    "majority": MajorityVote,
    "majority-zero": lambda: MajorityVote(tie="zero"),
    "ternary": TernaryVote,
    "average": Average,
    "quantized-2": lambda: QuantizedVote(bits=2),
    "quantized-4": lambda: QuantizedVote(bits=4),
    "quantized-8": lambda: QuantizedVote(bits=8),
    "full-bf16": lambda: FullPrecision(torch.bfloat16),
    "full-fp32": lambda: FullPrecision(torch.float32),
}
PATTERNS: Mapping[str, Exchange | Literal["auto"]] = {
    "direct": AllReduce(),
    "gather": AllGather(),
    "server": ParameterServer(),
    "auto": "auto",
}
_OVERLAP = "-overlap"


@dataclass(frozen=True)
class VoteMethod:
    """One of ours.

    Args:
        rule: A name of ``RULES``.
        pattern: A name of ``PATTERNS``.
        overlap: Whether votes leave during backward.
    """

    rule: str
    pattern: str
    overlap: bool

    @property
    def adapts(self) -> bool:
        """Whether its construction measures the link, so that every rate needs one of its own."""
        return self.overlap or self.pattern == "auto"


def parse_vote_method(name: str) -> VoteMethod:
    """Read ``RULE-PATTERN`` or ``RULE-PATTERN-overlap``, such as ``majority-direct``.

    Raises:
        InvalidArgumentError: There is no such rule or pattern.
    """
    base = name.removesuffix(_OVERLAP)
    rule, _, pattern = base.rpartition("-")
    if rule not in RULES or pattern not in PATTERNS:
        raise InvalidArgumentError(
            f"method {name!r}: expected {FLOOR}, {', '.join(RIVALS)}, or RULE-PATTERN[{_OVERLAP}] "
            f"with a rule of {', '.join(RULES)} and a pattern of {', '.join(PATTERNS)}"
        )
    return VoteMethod(rule, pattern, base != name)


def is_rival(name: str) -> bool:
    """Whether a method is the floor or a rival, not one of ours."""
    return name in (FLOOR, ALL_REDUCE, *RIVALS)


def adapts(name: str) -> bool:
    """Whether a method must be built anew for every rate."""
    return not is_rival(name) and parse_vote_method(name).adapts

"""The table of cases: every rule with every pattern and every option, as far as they combine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

import distlion

N_RANKS = 4
N_STEPS = 20
VIRTUAL = "virtual"
DOUBLING = "recursive-doubling"


@dataclass(frozen=True)
class Rule:
    """What a worker votes.

    Attributes:
        aggregation: The rule, as the optimizer takes it.
        cautious: Whether elements abstain where direction and gradient differ in sign.
    """

    aggregation: Any
    cautious: bool = False


@dataclass(frozen=True)
class Option:
    """How a case trains.

    Attributes:
        arguments: Further arguments of the optimizer.
        dtype: Of parameters.
        is_sharded: Whether two workers hold FSDP2 shards of parameters on two ranks each.
        weights: How often the vote of each rank counts; None for once.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    weights: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """One run. ``pattern`` is "virtual" for workers in one process."""

    rule: str
    pattern: str
    option: str

    @property
    def name(self) -> str:
        """The key of the case in digests.json."""
        return f"{self.rule} / {self.pattern} / {self.option}"


RULES: dict[str, Rule] = {
    "majority": Rule(distlion.MajorityVote()),
    "majority-zero": Rule(distlion.MajorityVote(tie="zero")),
    "ternary": Rule(distlion.TernaryVote()),
    "masked": Rule(distlion.MaskedVote()),
    "masked-random": Rule(distlion.MaskedVote(tie="random")),
    "average": Rule(distlion.Average()),
    **{f"quantized-{bits}": Rule(distlion.QuantizedVote(bits=bits)) for bits in range(1, 9)},
    **{
        f"quantized-{bits}-linf": Rule(distlion.QuantizedVote(bits=bits, norm="linf"))
        for bits in range(1, 9)
    },
    "quantized-3-wide": Rule(distlion.QuantizedVote(bits=3, step=0.9)),
    "feedback-1": Rule(distlion.FeedbackVote(1)),
    "feedback-2": Rule(distlion.FeedbackVote(2)),
    "full": Rule(distlion.FullPrecision()),
    "full-bf16": Rule(distlion.FullPrecision(torch.bfloat16)),
    "majority, cautious": Rule(distlion.MajorityVote(), cautious=True),
    "ternary, cautious": Rule(distlion.TernaryVote(), cautious=True),
    "average, cautious": Rule(distlion.Average(), cautious=True),
    "quantized-4, cautious": Rule(distlion.QuantizedVote(4), cautious=True),
    "feedback-2, cautious": Rule(distlion.FeedbackVote(2), cautious=True),
    "full, cautious": Rule(distlion.FullPrecision(), cautious=True),
}

PATTERNS: dict[str, Any] = {
    "all-reduce": distlion.AllReduce(),
    "all-gather": distlion.AllGather(),
    "parameter-server": distlion.ParameterServer(),
    DOUBLING: distlion.RecursiveDoubling(),
}

_OVERLAP = {"overlap": True}
_NODES = {"nodes": distlion.Nodes(ranks_per_node=2)}
_CLIPPED = {"clip_norm": distlion.ClipNorm(0.5)}
_CLIPPED_BY_ALL = {"clip_norm": distlion.ClipNorm(0.5, scope="global")}
_SYNC = {"momentum_sync": distlion.MomentumSync(every=4)}
_SYNC_IN_BYTES = {"momentum_sync": distlion.MomentumSync(every=5, dtype=torch.int8, stagger=False)}
_STOCHASTIC = {"rounding": "stochastic", "exp_avg_dtype": torch.float32}

OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "overlap": Option(_OVERLAP),
    "clipped": Option(_CLIPPED),
    "momentum sync": Option(_SYNC),
    "nodes": Option(_NODES),
    "mesh": Option(is_sharded=True),
}
"""Options of every rule."""

FURTHER_OPTIONS: dict[str, Option] = {
    "clipped by all": Option(_CLIPPED_BY_ALL),
    "momentum sync in 8 bits": Option(_SYNC_IN_BYTES),
    "bfloat16, stochastic": Option(_STOCHASTIC, dtype=torch.bfloat16),
    "nodes, overlap": Option({**_NODES, **_OVERLAP}),
    "nodes, clipped": Option({**_NODES, **_CLIPPED}),
    "nodes, momentum sync": Option({**_NODES, **_SYNC}),
    "mesh, overlap": Option(_OVERLAP, is_sharded=True),
    "mesh, clipped": Option(_CLIPPED, is_sharded=True),
    "mesh, momentum sync": Option(_SYNC, is_sharded=True),
    "weights": Option(weights=(1, 3, 2, 7)),
}
"""Options of ``REPRESENTATIVES`` only."""

ALL_OPTIONS = OPTIONS | FURTHER_OPTIONS

REPRESENTATIVES = (
    "majority",
    "ternary",
    "masked",
    "average",
    "majority-zero",
    "quantized-4",
    "quantized-4-linf",
    "feedback-1",
    "feedback-2",
    "full",
    "majority, cautious",
)
"""At least one rule of each class: the others differ from them in a number of bits."""


def list_cases() -> list[Case]:
    """Return every case."""
    return [
        Case(rule, pattern, name)
        for rule in RULES
        for name, option in _options_of(rule).items()
        for pattern in _patterns_of(rule, option)
    ]


def pick_quick_cases() -> list[Case]:
    """Return few cases with every rule, option and pattern, and some of virtual workers."""
    assert len(REPRESENTATIVES) >= len(FURTHER_OPTIONS)
    picked = list(zip(REPRESENTATIVES, itertools.cycle(FURTHER_OPTIONS), strict=False))
    others = [rule for rule in RULES if rule not in REPRESENTATIVES]
    picked += zip(others, itertools.cycle(OPTIONS), strict=False)
    of_all_rules = [name for name in PATTERNS if name != DOUBLING]
    cases = [
        # Each round over the options goes on with the next pattern.
        Case(rule, of_all_rules[(number + number // len(OPTIONS)) % len(of_all_rules)], option)
        for number, (rule, option) in enumerate(picked)
    ]
    cases += _pick_doubled()
    virtual = [
        name for name, option in ALL_OPTIONS.items() if VIRTUAL in _patterns_of("majority", option)
    ]
    pairs = zip(REPRESENTATIVES, itertools.cycle(virtual), strict=False)
    return cases + [Case(rule, VIRTUAL, option) for rule, option in pairs]


def _pick_doubled() -> list[Case]:
    """Return a case of ``RecursiveDoubling`` for each rule that it carries."""
    possible: dict[str, list[Case]] = {}
    for case in list_cases():
        if case.pattern == DOUBLING:
            possible.setdefault(case.rule, []).append(case)
    return [cases[number % len(cases)] for number, cases in enumerate(possible.values())]


def _options_of(rule: str) -> dict[str, Option]:
    return ALL_OPTIONS if rule in REPRESENTATIVES else OPTIONS


def _patterns_of(rule: str, option: Option) -> list[str]:
    """Return the patterns; virtual workers know no nodes, no overlap and no shards."""
    is_real = option.is_sharded or option.arguments.keys() & {"nodes", "overlap"}
    found = [*PATTERNS] if is_real else [*PATTERNS, VIRTUAL]
    # It adds integers that count once; the representatives have each kind of them.
    adds_up = rule in REPRESENTATIVES and RULES[rule].aggregation.vote_format.has_partial_sums
    if not adds_up or option.weights or "momentum_sync" in option.arguments:
        found.remove(DOUBLING)
    return found

"""The tables of cases: every rule with every pattern and every option, as far as they combine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import distlion

N_RANKS = 4
N_STEPS = 20
VIRTUAL = "virtual"
CREW = "crew"
DOUBLING = "recursive-doubling"


@dataclass(frozen=True)
class Rule:
    """What a worker votes.

    Attributes:
        aggregation: The rule, as the optimizer or the server of clients takes it.
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
        weights: How often the vote of each worker counts; None for once.
        n_workers: Number of workers, or of ranks.
        patterns: The patterns to try; None for all that can carry the votes.
        head_rule: The rule of the first group, where groups have different rules.
        orthogonalizes: Whether directions of matrices are orthogonalized.
        disturbance: What happens on the way: the last worker is "opposed" to the others, gradients
            are "broken", or hyperparameters are "scheduled".
        has_two_passes: Whether two backward passes make a step.
        newcomers: Momentum of workers that come; "" where members do not change.
        inner: The inner optimizer of ``LocalSteps``; "" for ``DistributedLion``.
        votes_last: Whether local steps end with a vote out of turn.
        is_machine_bound: Whether bits depend on the processor or torch's version. Such a case has
            no record; its patterns must agree, and ``compare`` tells whether a change moved it.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    weights: tuple[int, ...] | None = None
    n_workers: int = N_RANKS
    patterns: tuple[str, ...] | None = None
    head_rule: Any = None
    orthogonalizes: bool = False
    disturbance: Literal["", "opposed", "broken", "scheduled"] = ""
    has_two_passes: bool = False
    newcomers: Literal["", "zeros", "donor", "mean"] = ""
    inner: str = ""
    votes_last: bool = False
    is_machine_bound: bool = False


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
"""Rules of ``DistributedLion``."""

DELTA_RULES: dict[str, Rule] = {
    "scaled": Rule(distlion.ScaledVote()),
    "stochastic": Rule(distlion.StochasticVote()),
    **{f"residual-{bits}": Rule(distlion.ResidualVote(bits)) for bits in (1, 2)},
    **{f"estimate-{bits}": Rule(distlion.EstimateVote(bits)) for bits in (1, 2)},
}
"""Rules of ``LocalSteps`` alone."""

CLIENT_RULES = {f"clients, {name}": Rule(name) for name in ("majority", "stochastic", "residual")}
"""Rules of ``VirtualClients``."""

ALL_RULES = RULES | DELTA_RULES | CLIENT_RULES

PATTERNS: dict[str, Any] = {
    "all-reduce": distlion.AllReduce(),
    "all-gather": distlion.AllGather(),
    "parameter-server": distlion.ParameterServer(),
    DOUBLING: distlion.RecursiveDoubling(),
}

MEMBERS = {7: (0, 1, 3), 14: (0, 1, 3, 4)}
"""Ids of the workers from some step on, where members change: one leaves and returns anew."""

_ONE = ("all-gather",)
_FEW = ("all-reduce", VIRTUAL)
_WEIGHTS = (1, 3, 2, 7)
_OVERLAP = {"overlap": True}
_NODES = {"nodes": distlion.Nodes(ranks_per_node=2)}
_CLIPPED = {"clip_norm": distlion.ClipNorm(0.5)}
_CLIPPED_BY_ALL = {"clip_norm": distlion.ClipNorm(0.5, scope="global")}
_SYNC = {"momentum_sync": distlion.MomentumSync(every=4)}
_SYNC_IN_HALVES = {"momentum_sync": distlion.MomentumSync(every=5, dtype=torch.bfloat16)}
_SYNC_OF_SOME = {
    "momentum_sync": distlion.MomentumSync(
        every=3, select=("head_*", "body_gain"), dtype=torch.bfloat16
    )
}
_STOCHASTIC = {"precision": distlion.Precision(exp_avg=torch.float32, rounding="stochastic")}
_EXCLUDE = {"agreement": distlion.Agreement(every=2, on_disagreement="exclude")}
_ABSTAIN, _SKIP = {"nonfinite": "abstain"}, {"nonfinite": "skip"}
_CUT = ("all-reduce",)

OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "overlap": Option(_OVERLAP),
    "clipped": Option(_CLIPPED),
    "momentum sync": Option(_SYNC),
    "nodes": Option(_NODES),
    "mesh": Option(is_sharded=True),
    "weights": Option(weights=_WEIGHTS),
}
"""Options of every rule."""

FURTHER_OPTIONS: dict[str, Option] = {
    "clipped by all": Option(_CLIPPED_BY_ALL),
    "momentum sync in 16 bits": Option(_SYNC_IN_HALVES),
    "bfloat16, stochastic": Option(_STOCHASTIC, dtype=torch.bfloat16),
    "nodes, overlap": Option({**_NODES, **_OVERLAP}),
    "nodes, clipped": Option({**_NODES, **_CLIPPED}),
    "nodes, momentum sync": Option({**_NODES, **_SYNC}),
    "mesh, overlap": Option(_OVERLAP, is_sharded=True),
    "mesh, clipped": Option(_CLIPPED, is_sharded=True),
    "mesh, momentum sync": Option(_SYNC, is_sharded=True),
}
"""Options of ``REPRESENTATIVES`` only, with every pattern."""

SPARE_OPTIONS: dict[str, Option] = {
    **{
        f"{n} workers": Option(n_workers=n, patterns=("all-reduce", DOUBLING, VIRTUAL))
        for n in (2, 3, 5)
    },
    "weights, overlap": Option(_OVERLAP, weights=_WEIGHTS, patterns=_ONE),
    "weights, nodes": Option(_NODES, weights=_WEIGHTS, patterns=("parameter-server",)),
    "weights, mesh": Option(is_sharded=True, weights=_WEIGHTS, patterns=_ONE),
    "bfloat16": Option(dtype=torch.bfloat16, patterns=_FEW),
    "bfloat16, all stochastic": Option(
        {"precision": distlion.Precision(rounding="stochastic")},
        dtype=torch.bfloat16,
        patterns=_FEW,
    ),
    "float16": Option(dtype=torch.float16, patterns=_FEW),
    "momenta in bfloat16": Option(
        {"precision": distlion.Precision(exp_avg=torch.bfloat16)}, patterns=_FEW
    ),
    "momentum sync of some": Option(_SYNC_OF_SOME, patterns=_FEW),
    "excluded": Option(_EXCLUDE, disturbance="opposed", patterns=_FEW),
    "abstained": Option(_ABSTAIN, disturbance="broken", patterns=_FEW),
    "skipped": Option(_SKIP, disturbance="broken", patterns=_FEW),
    "scheduled": Option(disturbance="scheduled", patterns=_FEW),
    "two passes": Option(_OVERLAP, has_two_passes=True, patterns=_ONE),
    "mixed rules": Option(head_rule=distlion.MaskedVote(), patterns=_FEW),
    "matrices": Option(orthogonalizes=True, patterns=_FEW),
    "matrices, nodes": Option(_NODES, orthogonalizes=True, patterns=_CUT),
    "matrices, mesh": Option(is_sharded=True, orthogonalizes=True, patterns=_CUT),
    "matrices, torch's products": Option(orthogonalizes=True, patterns=_FEW, is_machine_bound=True),
    "members change": Option(newcomers="zeros", patterns=(VIRTUAL,)),
    "members change, donor": Option(newcomers="donor", patterns=(VIRTUAL,)),
    "members change, weights": Option(newcomers="mean", weights=_WEIGHTS, patterns=(VIRTUAL,)),
}
"""Options of ``REPRESENTATIVES`` only, with few patterns."""

_EVERY = {"every": 3}
_OUTER_MOMENTUM = {**_EVERY, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}

LOCAL_OPTIONS: dict[str, Option] = {
    "local": Option(_EVERY, inner="lion"),
    "local, outer momentum": Option(_OUTER_MOMENTUM, inner="lion", patterns=_FEW),
    "local, vote out of turn": Option(_EVERY, inner="lion", votes_last=True, patterns=_FEW),
    "local, weights": Option(_EVERY, inner="lion", weights=_WEIGHTS, patterns=_FEW),
    "local, nodes": Option({**_EVERY, **_NODES}, inner="lion", patterns=_CUT),
    "local, mesh": Option(_OUTER_MOMENTUM, inner="lion", is_sharded=True, patterns=_CUT),
    "local, bfloat16": Option(_EVERY, inner="lion", dtype=torch.bfloat16, patterns=_FEW),
    "local, abstained": Option(
        {**_EVERY, **_ABSTAIN}, inner="lion", disturbance="broken", patterns=_FEW
    ),
    "local, skipped": Option(
        {**_EVERY, **_SKIP}, inner="lion", disturbance="broken", patterns=_FEW
    ),
    "local, scheduled": Option(_EVERY, inner="lion", disturbance="scheduled", patterns=_FEW),
    "local, two inner": Option(_EVERY, inner="two lions", patterns=_FEW),
    "local, matrices": Option(_EVERY, inner="lion", orthogonalizes=True, patterns=_FEW),
    "local, members change": Option(_EVERY, inner="lion", newcomers="zeros", patterns=(VIRTUAL,)),
    **{
        f"local, {inner}": Option(_EVERY, inner=inner, patterns=_FEW, is_machine_bound=True)
        for inner in ("adamw", "sgd", "muon and adamw")
    },
}
"""Options of ``DELTA_RULES``."""

CLIENT_OPTIONS: dict[str, Option] = {
    "rounds": Option(patterns=(VIRTUAL,)),
    "rounds, equal": Option(
        {"weights": "equal", "momentum": 0.0, "spread": 2.0}, patterns=(VIRTUAL,)
    ),
    "rounds, scheduled": Option(
        {"lr": lambda number: 1 / (1 + number), "max_weight": 2.0, "min_replies": 4},
        patterns=(VIRTUAL,),
    ),
}
"""Options of ``CLIENT_RULES``."""

ALL_OPTIONS = OPTIONS | FURTHER_OPTIONS | SPARE_OPTIONS | LOCAL_OPTIONS | CLIENT_OPTIONS

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

IN_CREWS = {
    "members change": ("majority", "feedback-2", "full"),
    "local, members change": ("scaled", "residual-2"),
}
"""Options, and their rules, that a crew of processes trains too."""


def list_cases() -> list[Case]:
    """Return every case."""
    return [
        Case(rule, pattern, name)
        for rule in ALL_RULES
        for name in _options_of(rule)
        for pattern in _patterns_of(rule, name)
    ]


def is_recorded(case: Case) -> bool:
    """Return whether every machine gives a case the same bits, so that it has a record."""
    return not ALL_OPTIONS[case.option].is_machine_bound


def pick_quick_cases() -> list[Case]:
    """Return a sample: every pattern but crews, and each second option, by rules in turn."""
    assert len(REPRESENTATIVES) >= len(FURTHER_OPTIONS)
    picked = list(zip(REPRESENTATIVES, itertools.cycle(FURTHER_OPTIONS), strict=False))
    picked += zip(reversed(REPRESENTATIVES), OPTIONS, strict=False)
    of_all_rules = [name for name in PATTERNS if name != DOUBLING]
    cases = [
        # Each round over the options goes on with the next pattern.
        Case(rule, of_all_rules[(number + number // len(OPTIONS)) % len(of_all_rules)], option)
        for number, (rule, option) in enumerate(picked)
    ]
    return list(dict.fromkeys([*cases[::2], *_pick_doubled()[:1], *_pick_spare()[::2]]))


def _pick_doubled() -> list[Case]:
    """Return a case of ``RecursiveDoubling`` for each kind of integers that it adds."""
    possible: dict[str, list[Case]] = {}
    for case in list_cases():
        is_tried = ALL_OPTIONS[case.option].patterns is None and case.rule in REPRESENTATIVES
        if case.pattern == DOUBLING and is_tried:
            possible.setdefault(case.rule, []).append(case)
    return [cases[number % len(cases)] for number, cases in enumerate(possible.values())]


def _pick_spare() -> list[Case]:
    """Return a case of each option with few patterns: of doubling, else mostly of the last one."""
    possible: dict[str, list[Case]] = {}
    for case in list_cases():
        option = ALL_OPTIONS[case.option]
        if (option.patterns or option.inner) and is_recorded(case) and case.pattern != CREW:
            possible.setdefault(case.option, []).append(case)
    picked = []
    for number, cases in enumerate(possible.values()):
        rules = list(dict.fromkeys(case.rule for case in cases))
        of_rule = [case for case in cases if case.rule == rules[number % len(rules)]]
        doubled = [case for case in of_rule if case.pattern == DOUBLING]
        picked.append(doubled[0] if doubled else of_rule[-1 if number % 3 else 0])
    return picked


def _options_of(rule: str) -> dict[str, Option]:
    if rule in CLIENT_RULES:
        return CLIENT_OPTIONS
    if rule in DELTA_RULES:
        return LOCAL_OPTIONS
    if rule not in REPRESENTATIVES:
        return OPTIONS
    return OPTIONS | FURTHER_OPTIONS | SPARE_OPTIONS


def _patterns_of(rule: str, name: str) -> list[str]:
    """Return the patterns; virtual workers know no nodes, no overlap and no shards."""
    option = ALL_OPTIONS[name]
    if _is_refused(rule, option):
        return []
    is_real = option.is_sharded or option.arguments.keys() & {"nodes", "overlap"}
    possible = option.patterns or ([*PATTERNS] if is_real else [*PATTERNS, VIRTUAL])
    found = [each for each in possible if each != DOUBLING or _is_doubled(rule, option)]
    return [*found, CREW] if rule in IN_CREWS.get(name, ()) else found


def _is_refused(rule: str, option: Option) -> bool:
    """Return whether the optimizer refuses a rule with an option, by design."""
    given = ALL_RULES[rule]
    if "agreement" in option.arguments and given.aggregation.worker_state:
        return True  # an estimate remembers votes that did not count
    masks = given.cautious or isinstance(given.aggregation, distlion.MaskedVote)
    return option.orthogonalizes and masks


def _is_doubled(rule: str, option: Option) -> bool:
    """Return whether recursive doubling is tried: it adds integers that count once."""
    if option.weights or "momentum_sync" in option.arguments:
        return False
    # The representatives have each kind of integers.
    is_tried = rule in REPRESENTATIVES or not (option.arguments or option.is_sharded)
    return is_tried and ALL_RULES[rule].aggregation.vote_format.has_partial_sums

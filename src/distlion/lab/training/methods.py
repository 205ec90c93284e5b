"""Methods by name: how each trains real workers and virtual ones, and its place in comparisons.

A method of one name is a line of ``_MEANS`` or ``_SIGNUM``. A rule is a line of
``distlion.aggregation.RULES``: it has its name here, with masks, betas, momentum averaging and
local steps, without another line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from torch import nn

from distlion.aggregation import (
    RULES,
    SCALED_RULES,
    Aggregation,
    Average,
    MajorityVote,
    QuantizedVote,
    list_rule_names,
)
from distlion.errors import InvalidArgumentError
from distlion.lab.baselines import (
    Compression,
    DeepGradientCompression,
    GradDrop,
    HalfPrecision,
    PowerSGD,
    TernGrad,
    VirtualBaseline,
)
from distlion.lab.names import suggest
from distlion.lab.training.delta_votes import DeltaVotes
from distlion.lab.training.inner import (
    ADAMW,
    ADAMW_BETAS,
    LION,
    LION_LR,
    LION_WEIGHT_DECAY,
    MOMENTUM_SGD,
    NOISY_ADAMW,
    OUTER_SGD,
    PLAIN_OUTER_SGD,
    PLAIN_SGD,
    SGD_MOMENTUM,
    TRAIN_SGD,
    Inner,
    choose_adamw,
    choose_lion,
)
from distlion.lab.training.local_steps import LocalSteps, ScaledVotes
from distlion.lab.training.name_parts import (
    CAUTIOUS,
    SYNC,
    Betas,
    describe_betas,
    describe_steps,
    describe_variant,
    read_sync,
    split_name,
)
from distlion.lab.training.workers import (
    LION_BETAS,
    AveragingWorker,
    MethodRun,
    RealWorker,
    VirtualVoting,
    VirtualWorkers,
    VoteOptions,
    VotingWorker,
)
from distlion.optim import MomentumSync, lion_cub


class MethodKind(str, Enum):
    """The side of a method in a comparison."""

    OURS = "ours"
    BASELINE = "baseline"
    FULL_PRECISION = "full precision"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, which a name such as ``majority`` stands for.

    Attributes:
        name: Its name on the command line.
        description: A phrase for reports.
        definition: The same to the last number; a record is that of a method as defined here.
        kind: Its side in a comparison.
        base_lr: Center of its grid of learning rates in a comparison.
        weight_decay: Its default weight decay in a comparison.
        enter: Builds the virtual workers of a run.
        start: Builds this process's worker of a run; None where only a comparison knows it.
        votes: Whether workers vote in each step; False where they average.
        train_lr, train_weight_decay: Defaults for real workers.
    """

    name: str
    description: str
    definition: str
    kind: MethodKind
    base_lr: float
    weight_decay: float
    enter: Callable[[MethodRun], VirtualWorkers]
    start: Callable[[nn.Module, MethodRun, VoteOptions], RealWorker] | None = None
    votes: bool = False
    train_lr: float = LION_LR
    train_weight_decay: float = LION_WEIGHT_DECAY


def find_method(name: str) -> Method:
    """Return the method of a name in ``METHOD_NAMES``, as ``distlion compare`` takes it.

    Raises:
        InvalidArgumentError: There is none, or its momenta cannot be averaged as it says.
    """
    method = _find_mean(name) or _find_periodic(name) or _find_vote(name)
    if method is None:
        # In those of a pattern, letters in capitals stand for something.
        known = [*_list_plain_votes(), *(each for each in METHOD_NAMES if each.islower())]
        form = describe_betas(name, of=_WITH_BETAS) or describe_steps(name, of=_PERIODIC_NAMES)
        hint = suggest(name, known, all_in="distlion compare --help")
        raise InvalidArgumentError(f"method {name!r} is unknown; {hint}{form}")
    return method


def find_rule(name: str) -> Method:
    """Return the method of a name in ``RULE_NAMES``, as ``distlion train`` takes it.

    Raises:
        InvalidArgumentError: There is none.
    """
    method = None if SYNC.fullmatch(name) else _find_mean(name) or _find_vote(name)
    if method is None or method.start is None:
        known = [*_list_plain_votes(), *BASELINE_NAMES, f"{_LION}-cautious"]
        form = describe_betas(name, of=_WITH_BETAS)
        hint = suggest(name, known, all_in="distlion train --help")
        raise InvalidArgumentError(f"rule {name!r} is unknown; {hint}{form}")
    return method


# Votes in each step: a rule, its momenta, and how these are averaged, if at all.

_SIGNUM: dict[str, tuple[Aggregation, Betas, str]] = {
    "signum": (MajorityVote(), (0.9, 0.9), "Signum with majority vote (arXiv:1810.05291)"),
    "signum-average": (Average(), (0.9, 0.9), "Signum with the average of the signs"),
    "signsgd": (MajorityVote(), (0.0, 0.0), "signSGD with majority vote (arXiv:1810.05291)"),
}
"""Methods of others: our rules with their momenta. Betas (0, 0) vote on gradients."""

_LION_CUB = "lion-cub"


def _find_vote(name: str) -> Method | None:
    if name == _LION_CUB:
        return _make_lion_cub()
    synced = SYNC.fullmatch(name)
    base, cautious, betas = split_name(synced["stem"] if synced else name)
    signum = _SIGNUM.get(synced["stem"] if synced else name)
    if signum is not None:
        rule, betas, description = signum
    elif base in RULES:
        rule = RULES[base].rule
        description = describe_variant(RULES[base].description, cautious, betas)
    else:
        return None
    momentum_sync, how = read_sync(synced) if synced else (None, "")
    vote = VoteOptions(aggregation=rule, betas=betas or LION_BETAS, cautious=cautious)
    kind = MethodKind.OURS if signum is None else MethodKind.BASELINE
    return _vote(name, description + how, vote, momentum_sync, kind)


def _vote(
    name: str,
    description: str,
    vote: VoteOptions,
    momentum_sync: MomentumSync | None,
    kind: MethodKind = MethodKind.OURS,
) -> Method:
    masked = ", cautious=True" if vote["cautious"] else ""
    return Method(
        name=name,
        description=description,
        definition=f"{vote['aggregation']!r}, betas={vote['betas']}{masked}, {momentum_sync!r}",
        kind=kind,
        base_lr=LION_LR,
        weight_decay=LION_WEIGHT_DECAY,
        enter=partial(
            VirtualVoting.build,
            aggregation=vote["aggregation"],
            betas=vote["betas"],
            cautious=vote["cautious"],
            momentum_sync=momentum_sync,
        ),
        start=partial(VotingWorker.build, vote=vote) if momentum_sync is None else None,
        votes=True,
    )


def _make_lion_cub() -> Method:
    """Take the settings of ``distlion.lion_cub``, which makes real workers, from its defaults."""
    given = {name: each.default for name, each in inspect.signature(lion_cub).parameters.items()}
    rule = QuantizedVote(bits=given["bits"])
    description = "Lion Cub (arXiv:2411.16462): quantized votes, momenta averaged"
    vote = VoteOptions(aggregation=rule, betas=LION_BETAS, cautious=False)
    return _vote(_LION_CUB, description, vote, given["momentum_sync"])


def _list_plain_votes() -> list[str]:
    """Return every name without betas, each number of bits a name of its own."""
    return [*RULES, *(f"{name}{CAUTIOUS}" for name in RULES), *_SIGNUM]


# Averaged gradients, compressed or not, for one optimizer.

# The comparison of arXiv:2404.00438 keeps 4 % of the entries.
_KEPT = 0.04
# Of the run, in place of 4 epochs of the paper's 90 or more.
_WARM_UP_SHARE = 0.05
_WITH_BETAS = _LION, _ADAMW = "global-lion", "global-adamw"
_Compression = Compression | PowerSGD


def _mean(
    name: str,
    description: str,
    inner: Inner,
    compression: _Compression | None = None,
    *,
    train: Inner | None = None,
) -> Method:
    """Make a method of one optimizer; ``train`` is that of real workers, if they know it."""
    how = "mean gradient" if compression is None else repr(compression)
    if isinstance(compression, DeepGradientCompression):
        how += f" with a warm-up of {_WARM_UP_SHARE:.0%}"
    return Method(
        name=name,
        description=description,
        definition=f"{how}; {inner.name}",
        kind=MethodKind.FULL_PRECISION if compression is None else MethodKind.BASELINE,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=partial(_enter_mean, inner=inner, compression=compression),
        start=partial(_start_mean, inner=train, compression=compression) if train else None,
        train_lr=(train or inner).base_lr,
        train_weight_decay=(train or inner).weight_decay,
    )


def _enter_mean(
    run: MethodRun, *, inner: Inner, compression: _Compression | None = None
) -> VirtualWorkers:
    compression = _warm_up(compression, run)
    optimizer = inner.make(run)
    return VirtualBaseline(optimizer, workers=run.workers, compression=compression, seed=run.seed)


def _start_mean(
    model: nn.Module,
    run: MethodRun,
    _: VoteOptions,
    *,
    inner: Inner,
    compression: _Compression | None,
) -> RealWorker:
    compression = _warm_up(compression, run)
    return AveragingWorker.build(model, inner.make(run), compression, seed=run.seed)


def _warm_up(compression: _Compression | None, run: MethodRun) -> _Compression | None:
    if not isinstance(compression, DeepGradientCompression):
        return compression
    share = round(_WARM_UP_SHARE * run.steps)
    return replace(
        compression, warmup_steps=share if run.warmup_steps is None else run.warmup_steps
    )


_TERNGRAD = "TernGrad (arXiv:1705.07878)"
_GRADDROP = f"GradDrop (arXiv:1704.05021) of all but {_KEPT:.0%}"
_DGC = f"Deep Gradient Compression (arXiv:1712.01887) to {_KEPT:.0%}"
_POWERSGD = f"PowerSGD (arXiv:1905.13727) of rank {PowerSGD().rank}, Lion"
_LARGEST = GradDrop(keep=_KEPT)
_LARGEST_MOMENTUM = DeepGradientCompression(keep=_KEPT, momentum=SGD_MOMENTUM)

# TernGrad and GradDrop say nothing of the optimizer. Real workers get AdamW: with plain SGD, vision
# transformers and GPTs barely train. DGC has its momentum inside, and SGD without one outside,
# whose L2 term is then decoupled weight decay.
_MEANS = (
    _mean(_LION, "Lion on the mean gradient", LION, train=LION),
    _mean(_ADAMW, "AdamW on the mean gradient", ADAMW, train=ADAMW),
    _mean("global-sgd", "SGD with momentum on the mean gradient", MOMENTUM_SGD),
    _mean("ddp-fp16", "Lion on a float16 all-reduce", LION, HalfPrecision(), train=LION),
    _mean("ddp-powersgd", _POWERSGD, LION, PowerSGD(), train=LION),
    _mean("terngrad", f"{_TERNGRAD}, SGD with momentum", MOMENTUM_SGD, TernGrad(), train=ADAMW),
    _mean("terngrad-adamw", f"{_TERNGRAD}, AdamW", NOISY_ADAMW, TernGrad()),
    _mean("graddrop", f"{_GRADDROP}, SGD with momentum", MOMENTUM_SGD, _LARGEST, train=ADAMW),
    _mean("graddrop-adamw", f"{_GRADDROP}, AdamW", NOISY_ADAMW, _LARGEST),
    _mean("dgc", f"{_DGC}, SGD with its momentum", PLAIN_SGD, _LARGEST_MOMENTUM, train=TRAIN_SGD),
)
MEANS = {method.name: method for method in _MEANS}
"""Methods that average gradients, by name."""


def _find_mean(name: str) -> Method | None:
    base, cautious, betas = split_name(name)
    if betas is None and not cautious:
        return MEANS.get(name)
    if base == _LION:
        inner = choose_lion(betas or LION_BETAS, cautious=cautious)
    elif base == _ADAMW and not cautious:
        inner = choose_adamw(betas or ADAMW_BETAS)
    else:
        return None
    description = describe_variant(MEANS[base].description, cautious, betas)
    return _mean(name, description, inner, train=inner)


# An exchange every K steps, of what local steps have moved.

_PERIODIC = re.compile(
    r"(?:diloco|(?P<rule>.+)-every)-(?P<every>[1-9]\d*)(?P<inner>-lion)?(?P<outer>-plain)?"
)
_DILOCO = ", DiLoCo (arXiv:2311.08105)"
_PERIODIC_NAMES = ("diloco-K[-lion][-plain]", "RULE-every-K[-lion][-plain]")


def _find_periodic(name: str) -> Method | None:
    match = _PERIODIC.fullmatch(name)
    if match is None or match["rule"] not in (None, *RULES, *SCALED_RULES):
        return None
    every = int(match["every"])
    inner = LION if match["inner"] else ADAMW
    outer = PLAIN_OUTER_SGD if match["outer"] else OUTER_SGD
    vote, delta_rule = RULES.get(match["rule"]), SCALED_RULES.get(match["rule"])
    how = "mean" if vote is None else f"{vote.rule!r} x mean magnitude"
    said = "mean" if vote is None else f"{vote.description},"
    steps = f"{every} local steps of {inner.name.partition('(')[0]}"
    is_diloco = match["rule"] is None and match["outer"] is None and match["inner"] is None
    make_outer: Callable[[MethodRun], VirtualWorkers] = (
        partial(_enter_mean, inner=outer)
        if vote is None
        else partial(ScaledVotes, rule=vote.rule, make_optimizer=outer.make)
    )
    enter: Callable[[MethodRun], VirtualWorkers]
    enter = partial(LocalSteps, every=every, make_inner=inner.make, make_outer=make_outer)
    if delta_rule is not None:
        how = said = repr(delta_rule)
        enter = partial(DeltaVotes, every=every, rule=delta_rule, make_inner=inner.make)
        enter = partial(enter, is_plain=match["outer"] is not None)
    return Method(
        name=name,
        description=f"{said} of deltas of {steps}{_DILOCO if is_diloco else ''}",
        definition=f"{how} of deltas of {every} steps of {inner.name}; outer {outer.name}",
        kind=MethodKind.BASELINE if match["rule"] is None else MethodKind.OURS,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=enter,
    )


# For messages and help. P is 1 to 8 bits, 2 at most for feedback; A and B are digits of betas; K is
# a number of steps, before which RULE may be one for deltas; plain has no outer momentum.

_VOTE_NAMES = (
    *list_rule_names(),
    *("RULE-cautious", "RULE-betas-A-B", "RULE-cautious-betas-A-B"),
    *_SIGNUM,
)
_SYNC_NAMES = ("K", "exp", "K-auto", "K-attention", "K-int8")
_MASKED_MEAN = f"{_LION}{CAUTIOUS}"
BASELINE_NAMES = tuple(method.name for method in _MEANS if method.start is not None)
"""Rules of ``distlion train`` that average gradients."""
RULE_NAMES = (
    *_VOTE_NAMES,
    *BASELINE_NAMES,
    *(f"{name}-betas-A-B" for name in _WITH_BETAS),
    _MASKED_MEAN,
    f"{_MASKED_MEAN}-betas-A-B",
)
"""Rules of ``distlion train``."""
METHOD_NAMES = (
    *_VOTE_NAMES,
    _LION_CUB,
    *(f"RULE-sync-{how}" for how in _SYNC_NAMES),
    *_PERIODIC_NAMES,
    *MEANS,
    _MASKED_MEAN,
    *(f"{name}-betas-A-B" for name in _WITH_BETAS),
    f"{_MASKED_MEAN}-betas-A-B",
)
"""Methods of ``distlion compare``."""

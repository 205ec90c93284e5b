"""Methods that exchange every K steps, read from their names: what is sent, and what is inside."""

from __future__ import annotations

import re
from functools import partial

import torch

from distlion.aggregation import RULES, Aggregation
from distlion.lab.training.averagers import ADAMW, LION, Inner, average
from distlion.lab.training.contender import Contender, MethodKind
from distlion.lab.training.local_steps import LocalSteps, ScaledVotes
from distlion.lab.training.virtual_method import Entry, VirtualMethod

# DiLoCo's choice (arXiv:2311.08105), for votes too: only what is exchanged differs.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
_PERIODIC = re.compile(
    r"(?:diloco|(?P<rule>.+)-every)-(?P<every>[1-9]\d*)(?P<inner>-lion)?(?P<outer>-plain)?"
)
_INNER = {None: ADAMW, "-lion": LION}

PERIODIC_NAMES = ("diloco-K[-lion][-plain]", "RULE-every-K[-lion][-plain]")
"""For messages and help; K is a number of local steps, plain has no outer momentum."""


def _make_outer_sgd(entry: Entry, *, lr: float, momentum: float) -> torch.optim.Optimizer:
    params = [param for _, param in entry.params]
    return torch.optim.SGD(params, lr, momentum=momentum, nesterov=momentum > 0)


_OUTER = {
    None: Inner(
        f"SGD(lr={OUTER_LR}, momentum={OUTER_MOMENTUM}, nesterov=True)",
        partial(_make_outer_sgd, lr=OUTER_LR, momentum=OUTER_MOMENTUM),
        OUTER_LR,
        0.0,
    ),
    # Of means: the workers' parameters are averaged.
    "-plain": Inner("SGD(lr=1.0)", partial(_make_outer_sgd, lr=1.0, momentum=0.0), 1.0, 0.0),
}


def find_periodic(name: str) -> Contender | None:
    """Return the method of a name; None if it is none of ``PERIODIC_NAMES``."""
    match = _PERIODIC.fullmatch(name)
    if match is None or (match["rule"] is not None and match["rule"] not in RULES):
        return None
    every, inner, outer = int(match["every"]), _INNER[match["inner"]], _OUTER[match["outer"]]
    vote = RULES[match["rule"]] if match["rule"] else None
    what = "mean" if vote is None else f"{vote.description},"
    what += f" of deltas of {every} local steps of {inner.name.partition('(')[0]}"
    is_diloco = vote is None and match["outer"] is None and match["inner"] is None
    how = "mean" if vote is None else f"{vote.rule!r} x mean magnitude"
    return Contender(
        name=name,
        description=what + (", DiLoCo (arXiv:2311.08105)" if is_diloco else ""),
        definition=f"{how} of deltas of {every} steps of {inner.name}; outer {outer.name}",
        kind=MethodKind.BASELINE if vote is None else MethodKind.OURS,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=partial(
            _enter,
            every=every,
            inner=inner,
            outer=outer,
            aggregation=None if vote is None else vote.rule,
        ),
    )


def describe_steps(name: str) -> str:
    """Return what an unknown name with local steps must look like, for its error; or ""."""
    if "diloco" not in name and "-every-" not in name:
        return ""
    return (
        f"; methods with local steps are {' and '.join(PERIODIC_NAMES)}; RULE is a rule and K a "
        "number of steps, 1 or more"
    )


def _enter(
    entry: Entry, *, every: int, inner: Inner, outer: Inner, aggregation: Aggregation | None
) -> VirtualMethod:
    def make_outer(anchored: Entry) -> VirtualMethod:
        if aggregation is None:
            return average(anchored, inner=outer)
        return ScaledVotes(anchored, rule=aggregation, make_optimizer=outer.make)

    return LocalSteps(entry, every=every, make_inner=inner.make, make_outer=make_outer)

"""Methods that take local steps and exchange their deltas every K steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distlion.votes import SCALED_RULES, Aggregation
from distlion_lab.baselines.top_bits import TopBits
from distlion_lab.training.delta_votes import NESTEROV, PLAIN, DeltaVotes, OuterChoice
from distlion_lab.training.inner import ADAMW, LION, OUTER_SGD, PLAIN_OUTER_SGD, Inner
from distlion_lab.training.local_steps import LocalSteps
from distlion_lab.training.means import enter_mean
from distlion_lab.training.method import Method, MethodKind
from distlion_lab.training.workers import MethodRun, VirtualWorkers

PERIODIC_NAMES = (
    "diloco-K[-lion][-plain]",
    "sparse-K",
    "RULE-every-K[-lion][-plain]",
    "local-K-RULE-plain",
    "local-K-RULE-nesterov",
)
"""Patterns of their names."""
_DILOCO = re.compile(r"diloco-(?P<every>[1-9]\d*)(?P<inner>-lion)?(?P<outer>-plain)?")
_SPARSE = re.compile(r"sparse-(?P<every>[1-9]\d*)")
_VOTED = re.compile(r"(?P<rule>.+)-every-(?P<every>[1-9]\d*)(?P<inner>-lion)?(?P<outer>-plain)?")
_LOCAL = re.compile(r"local-(?P<every>[1-9]\d*)-(?P<rule>.+)-(?P<outer>plain|nesterov)")
Enter = Callable[[MethodRun], VirtualWorkers]


def find_periodic(name: str) -> Method | None:
    """Return the method of a name with local steps; None where there is none."""
    if match := _DILOCO.fullmatch(name):
        return _find_diloco(match)
    if match := _SPARSE.fullmatch(name):
        return _find_sparse(match)
    if match := _LOCAL.fullmatch(name):
        return _find_local(match)
    match = _VOTED.fullmatch(name)
    return None if match is None else _find_voted(match)


def _find_diloco(match: re.Match[str]) -> Method:
    inner, outer = _read_inner(match), PLAIN_OUTER_SGD if match["outer"] else OUTER_SGD
    is_papers = match["inner"] is None and match["outer"] is None
    return _make(
        match,
        inner,
        how="mean",
        outer=outer.name,
        kind=MethodKind.BASELINE,
        enter=_exchange_by(partial(enter_mean, inner=outer), match, inner),
        after=", DiLoCo (arXiv:2311.08105)" if is_papers else "",
    )


def _find_sparse(match: re.Match[str]) -> Method:
    message = TopBits()
    make_outer = partial(enter_mean, inner=PLAIN_OUTER_SGD, compression=message)
    return _make(
        match,
        ADAMW,
        how=f"mean of {message!r}",
        said="mean of the largest 1/64",
        outer=PLAIN_OUTER_SGD.name,
        kind=MethodKind.BASELINE,
        enter=_exchange_by(make_outer, match, ADAMW),
        after=", as SparseLoCo (arXiv:2508.15706)",
    )


def _find_voted(match: re.Match[str]) -> Method | None:
    rule = SCALED_RULES.get(match["rule"])
    if rule is None:
        return None
    return _vote(match, rule, _read_inner(match), PLAIN if match["outer"] else NESTEROV)


@dataclass(frozen=True)
class LocalVotes:
    """The parts of a name ``local-K-RULE-OUTER``.

    Attributes:
        every: Steps from vote to vote, K.
        rule: Rule of the votes on deltas.
        outer: The outer step.
    """

    every: int
    rule: Aggregation
    outer: OuterChoice


def read_local_votes(name: str) -> LocalVotes | None:
    """Split the name of a method of ``LocalSteps`` over AdamW; None where it is none."""
    match = _LOCAL.fullmatch(name)
    if match is None:
        return None
    rule = SCALED_RULES.get(match["rule"])
    outer = PLAIN if match["outer"] == "plain" else NESTEROV
    return None if rule is None else LocalVotes(int(match["every"]), rule, outer)


def _find_local(match: re.Match[str]) -> Method | None:
    votes = read_local_votes(match[0])
    return None if votes is None else _vote(match, votes.rule, ADAMW, votes.outer)


def _vote(match: re.Match[str], rule: Aggregation, inner: Inner, outer: OuterChoice) -> Method:
    every = int(match["every"])
    return _make(
        match,
        inner,
        how=repr(rule),
        outer=str(outer),
        kind=MethodKind.OURS,
        enter=partial(DeltaVotes, every=every, rule=rule, make_inner=inner.make, outer=outer),
    )


def _read_inner(match: re.Match[str]) -> Inner:
    return LION if match["inner"] else ADAMW


def _exchange_by(make_outer: Enter, match: re.Match[str], inner: Inner) -> Enter:
    every = int(match["every"])
    return partial(LocalSteps, every=every, make_inner=inner.make, make_outer=make_outer)


def _make(
    match: re.Match[str],
    inner: Inner,
    *,
    how: str,
    outer: str,
    kind: MethodKind,
    enter: Enter,
    said: str = "",
    after: str = "",
) -> Method:
    """Make a method; reports show ``said`` instead of ``how``."""
    steps = f"{match['every']} local steps of {inner.name.partition('(')[0]}"
    return Method(
        name=match[0],
        description=f"{said or how} of deltas of {steps}{after}",
        definition=f"{how} of deltas of {match['every']} steps of {inner.name}; outer {outer}",
        kind=kind,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=enter,
    )

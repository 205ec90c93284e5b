"""Methods by name: how each trains real workers and virtual ones, and its place in comparisons.

A method of one name is a line of ``means.MEANS`` or ``_SIGNUM``. A rule is a line of
``distlion.votes.RULES``. That line also gives it its name here, with masks, betas, momentum
averaging and local steps.
"""

from __future__ import annotations

import inspect
from functools import partial

from distlion.errors import InvalidArgumentError
from distlion.optim import lion_cub
from distlion.step import MomentumSync
from distlion.votes import (
    RULES,
    Aggregation,
    Average,
    MajorityVote,
    MaskedVote,
    QuantizedVote,
    list_rule_names,
)
from distlion_lab.names import suggest
from distlion_lab.training.inner import LION_LR, LION_WEIGHT_DECAY
from distlion_lab.training.means import LION_MEAN, MEANS, WITH_BETAS, find_mean
from distlion_lab.training.method import Method, MethodKind
from distlion_lab.training.name_parts import (
    CAUTIOUS,
    ORTHOGONAL,
    SYNC,
    Betas,
    describe_betas,
    describe_steps,
    describe_variant,
    read_sync,
    split_name,
)
from distlion_lab.training.periodic import PERIODIC_NAMES, find_periodic
from distlion_lab.training.workers import LION_BETAS, VirtualVoting, VoteOptions, VotingWorker

RECIPE = "majority-cautious-betas-90-95"
"""The settings of the page "The recipe"."""


def find_method(name: str) -> Method:
    """Return the method of a name in ``METHOD_NAMES``, for ``distlion compare``.

    Raises:
        InvalidArgumentError: There is none, or its momenta cannot be averaged in this way, or its
            rule cannot vote on orthogonalized directions.
    """
    method = find_mean(name) or find_periodic(name) or _find_vote(name)
    if method is None:
        # Capital letters in a pattern are placeholders.
        known = [RECIPE, *_list_plain_votes(), *(each for each in METHOD_NAMES if each.islower())]
        form = describe_betas(name, of=WITH_BETAS) or describe_steps(name, of=PERIODIC_NAMES)
        hint = suggest(name, known, all_in="distlion compare --help")
        raise InvalidArgumentError(f"method {name!r} is unknown; {hint}{form}")
    return method


def find_rule(name: str) -> Method:
    """Return the method of a name in ``RULE_NAMES``, for ``distlion train``.

    Raises:
        InvalidArgumentError: There is none.
    """
    method = None if SYNC.fullmatch(name) else find_mean(name) or _find_vote(name)
    if method is None or method.start is None:
        known = [RECIPE, *_list_plain_votes(), *BASELINE_NAMES, f"{LION_MEAN}-cautious"]
        form = describe_betas(name, of=WITH_BETAS)
        hint = suggest(name, known, all_in="distlion train --help")
        raise InvalidArgumentError(f"rule {name!r} is unknown; {hint}{form}")
    return method


# Votes in each step: a rule, its betas, and a description.

_SIGNUM: dict[str, tuple[Aggregation, Betas, str]] = {
    "signum": (MajorityVote(), (0.9, 0.9), "Signum with majority vote (arXiv:1810.05291)"),
    "signum-average": (Average(), (0.9, 0.9), "Signum with the average of the signs"),
    "signsgd": (MajorityVote(), (0.0, 0.0), "signSGD with majority vote (arXiv:1810.05291)"),
}
"""Published methods: our rules with their momenta. Betas (0, 0) vote on gradients."""

_LION_CUB = "lion-cub"


def _find_vote(name: str) -> Method | None:
    if name == _LION_CUB:
        return _make_lion_cub()
    synced = SYNC.fullmatch(name)
    base, cautious, betas = split_name(synced["stem"] if synced else name)
    orthogonal = base.endswith(ORTHOGONAL) and not cautious
    base = base.removesuffix(ORTHOGONAL) if orthogonal else base
    signum = _SIGNUM.get(synced["stem"] if synced else name)
    if signum is not None:
        rule, betas, description = signum
    elif base in RULES:
        rule = RULES[base].rule
        if orthogonal and isinstance(rule, MaskedVote):
            raise InvalidArgumentError(
                f"method {name!r}: a mask at the counter made votes on orthogonalized matrices "
                f"worse. Expected another rule, such as 'majority{ORTHOGONAL}'"
            )
        description = describe_variant(
            RULES[base].description, cautious, betas, orthogonal=orthogonal
        )
    else:
        return None
    momentum_sync, how = read_sync(synced) if synced else (None, "")
    vote = VoteOptions(aggregation=rule, betas=betas or LION_BETAS, cautious=cautious)
    kind = MethodKind.OURS if signum is None else MethodKind.BASELINE
    return _vote(name, description + how, vote, momentum_sync, kind, orthogonal=orthogonal)


def _vote(
    name: str,
    description: str,
    vote: VoteOptions,
    momentum_sync: MomentumSync | None,
    kind: MethodKind = MethodKind.OURS,
    *,
    orthogonal: bool = False,
) -> Method:
    cautious = ", cautious=True" if vote["cautious"] else ""
    cautious += ", matrices with orthogonalize=True, others cautious" if orthogonal else ""
    is_masked = vote["cautious"] or isinstance(vote["aggregation"], MaskedVote)
    return Method(
        name=name,
        description=description,
        definition=f"{vote['aggregation']!r}, betas={vote['betas']}{cautious}, {momentum_sync!r}",
        kind=kind,
        base_lr=LION_LR,
        weight_decay=LION_WEIGHT_DECAY,
        enter=partial(
            VirtualVoting.build,
            aggregation=vote["aggregation"],
            betas=vote["betas"],
            cautious=vote["cautious"],
            orthogonalize=orthogonal,
            momentum_sync=momentum_sync,
        ),
        start=(
            partial(VotingWorker.build, vote=vote, orthogonalize=orthogonal)
            if momentum_sync is None
            else None
        ),
        votes=True,
        # Best of three rates on the embedded text, of majority votes and of MaskedVote().
        train_lr=(2 if is_masked else 1) * LION_LR,
    )


def _make_lion_cub() -> Method:
    """Make Lion Cub with the defaults of ``distlion.lion_cub``, which makes real workers."""
    given = {name: each.default for name, each in inspect.signature(lion_cub).parameters.items()}
    rule = QuantizedVote(bits=given["bits"])
    description = "Lion Cub (arXiv:2411.16462): quantized votes, momenta averaged"
    vote = VoteOptions(aggregation=rule, betas=LION_BETAS, cautious=False)
    return _vote(_LION_CUB, description, vote, given["momentum_sync"])


def _list_plain_votes() -> list[str]:
    """Return every name without betas; each number of bits has a name of its own."""
    cautious = [f"{name}{CAUTIOUS}" for name in RULES]
    orthogonal = [
        f"{name}{ORTHOGONAL}"
        for name, named in RULES.items()
        if not isinstance(named.rule, MaskedVote)
    ]
    return [*RULES, *cautious, *orthogonal, *_SIGNUM]


# For messages and help. P is 1 to 8 bits, at most 2 for feedback. A and B are digits of betas. K is
# a number of steps; RULE may then be a rule for deltas. Plain has no outer momentum.

_VOTE_NAMES = (
    *list_rule_names(),
    *("RULE-cautious", "RULE-betas-A-B", "RULE-cautious-betas-A-B"),
    *("RULE-orthogonal", "RULE-orthogonal-betas-A-B"),
    *_SIGNUM,
)
_SYNC_NAMES = ("K", "K-attention", "K-bf16")
_VARIANT_MEANS = [
    f"{LION_MEAN}{variant}{betas}"
    for variant in (CAUTIOUS, ORTHOGONAL)
    for betas in ("", "-betas-A-B")
]
BASELINE_NAMES = tuple(method.name for method in MEANS.values() if method.start is not None)
"""Rules of ``distlion train`` that average gradients."""
RULE_NAMES = (
    *_VOTE_NAMES,
    *BASELINE_NAMES,
    *(f"{name}-betas-A-B" for name in WITH_BETAS),
    *_VARIANT_MEANS,
)
"""Rules of ``distlion train``."""
METHOD_NAMES = (
    *_VOTE_NAMES,
    _LION_CUB,
    *(f"RULE-sync-{how}" for how in _SYNC_NAMES),
    *PERIODIC_NAMES,
    *MEANS,
    *(f"{name}-betas-A-B" for name in WITH_BETAS),
    *_VARIANT_MEANS,
)
"""Methods of ``distlion compare``."""

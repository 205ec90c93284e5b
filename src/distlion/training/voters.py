"""Methods that vote, read from their names: a rule, and how momenta are averaged, if at all."""

from __future__ import annotations

import inspect
import re
from functools import partial

import torch

from distlion.aggregation import (
    Aggregation,
    Average,
    FullPrecision,
    MajorityVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.optim import MomentumSync, lion_cub
from distlion.training.contender import Contender, MethodKind
from distlion.training.virtual_method import LION_BETAS, VotingMethod

# As for `distlion train`: small sweeps of one seed, in docs/lab-notebook.md.
LION_LR = 5e-4
LION_WEIGHT_DECAY = 0.1

_SIGNUM_BETAS = (0.9, 0.9)
_SIGNSGD_BETAS = (0.0, 0.0)

_RULES: dict[str, tuple[Aggregation, tuple[float, float], str]] = {
    "majority": (MajorityVote(), LION_BETAS, "majority vote, ties by a coin"),
    "majority-zero": (MajorityVote(tie="zero"), LION_BETAS, "majority vote, 0 on a tie"),
    "ternary": (TernaryVote(), LION_BETAS, "vote of -1, 0 or 1, 0 on a tie"),
    "average": (Average(), LION_BETAS, "average of the signs"),
    "full": (FullPrecision(), LION_BETAS, "sign of the mean of uncompressed directions"),
    "signum": (MajorityVote(), _SIGNUM_BETAS, "Signum with majority vote (arXiv:1810.05291)"),
    "signum-average": (Average(), _SIGNUM_BETAS, "Signum with the average of the signs"),
    "signsgd": (MajorityVote(), _SIGNSGD_BETAS, "signSGD with majority vote (arXiv:1810.05291)"),
}
_LION_CUB = "lion-cub"
_QUANTIZED = re.compile(r"quantized-([1-8])(-linf)?")
_SYNC = re.compile(
    r"(?P<rule>.+)-sync-(?P<every>\d+|exp)(?P<where>-auto|-attention)?(?P<dtype>-bf16|-int8)?"
)
_WHERE: dict[str | None, tuple[str | tuple[str, ...], str]] = {
    None: ("all", ""),
    "-auto": ("auto", ", where they differ most"),
    # As transformers call them.
    "-attention": (("*attention*", "*attn*"), ", those of the attention"),
}
_DTYPES = {None: torch.float32, "-bf16": torch.bfloat16, "-int8": torch.int8}

VOTER_NAMES = (
    *_RULES,
    _LION_CUB,
    "quantized-P",
    "quantized-P-linf",
    "RULE-sync-K",
    "RULE-sync-exp",
    "RULE-sync-K-auto",
    "RULE-sync-K-attention",
    "RULE-sync-K-int8",
)
"""For messages and help; P is 1 to 8, K a number of steps."""


def find_voter(name: str) -> Contender | None:
    """Return the method of a name; None if it is none of ``VOTER_NAMES``.

    Raises:
        InvalidArgumentError: Its momenta cannot be averaged as it says.
    """
    if name == _LION_CUB:
        return _make_lion_cub()
    synced = _SYNC.fullmatch(name)
    rule = _find_rule(synced["rule"] if synced else name)
    if rule is None:
        return None
    aggregation, betas, description = rule
    if synced is None:
        return _make_voter(name, description, aggregation, betas, None)
    momentum_sync, how = _read_sync(synced)
    return _make_voter(name, f"{description}; {how}", aggregation, betas, momentum_sync)


def _make_lion_cub() -> Contender:
    """Take the settings of ``distlion.lion_cub``, which makes real workers, from its defaults."""
    given = {name: each.default for name, each in inspect.signature(lion_cub).parameters.items()}
    rule, sync = QuantizedVote(bits=given["bits"]), given["momentum_sync"]
    description = "Lion Cub (arXiv:2411.16462): quantized votes, momenta averaged"
    return _make_voter(_LION_CUB, description, rule, LION_BETAS, sync)


def _make_voter(
    name: str,
    description: str,
    aggregation: Aggregation,
    betas: tuple[float, float],
    momentum_sync: MomentumSync | None,
) -> Contender:
    return Contender(
        name=name,
        description=description,
        definition=f"{aggregation!r}, betas={betas}, {momentum_sync!r}",
        # Signum and signSGD are Lion's rule with other momenta, and others' methods.
        kind=MethodKind.OURS if betas == LION_BETAS else MethodKind.RIVAL,
        base_lr=LION_LR,
        weight_decay=LION_WEIGHT_DECAY,
        enter=partial(
            VotingMethod.build, aggregation=aggregation, betas=betas, momentum_sync=momentum_sync
        ),
    )


def _find_rule(name: str) -> tuple[Aggregation, tuple[float, float], str] | None:
    quantized = _QUANTIZED.fullmatch(name)
    if quantized is None:
        return _RULES.get(name)
    bits, linf = int(quantized[1]), quantized[2] is not None
    rule = QuantizedVote(bits=bits, norm="linf" if linf else "l1")
    scale = "largest" if linf else "mean"
    return rule, LION_BETAS, f"{bits}-bit votes, scaled by the {scale} magnitude"


def _read_sync(match: re.Match[str]) -> tuple[MomentumSync, str]:
    select, where = _WHERE[match["where"]]
    dtype = _DTYPES[match["dtype"]]
    if match["every"] == "exp":
        sync = MomentumSync(schedule="exponential", select=select, dtype=dtype)
        how = "momenta averaged at intervals that double"
    else:
        sync = MomentumSync(every=int(match["every"]), select=select, dtype=dtype)
        how = f"momenta averaged every {match['every']} steps"
    how += where
    if match["dtype"]:
        how += f", as {match['dtype'].removeprefix('-')}"
    return sync, how

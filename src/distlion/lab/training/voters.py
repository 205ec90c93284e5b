"""Methods that vote, read from their names: a rule, and how momenta are averaged, if at all."""

from __future__ import annotations

import inspect
import re
from functools import partial

import torch

from distlion.aggregation import QuantizedVote
from distlion.lab.training.contender import Contender, MethodKind
from distlion.lab.training.virtual_method import VirtualVoting
from distlion.lab.training.vote_names import LION_BETAS, NamedVote, find_vote, list_vote_names
from distlion.optim import MomentumSync, lion_cub

# As for `distlion train`: small sweeps of one seed, in docs/explanation/lab-notebook.md.
LION_LR = 5e-4
LION_WEIGHT_DECAY = 0.1

_LION_CUB = "lion-cub"
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
    *list_vote_names(),
    _LION_CUB,
    "RULE-sync-K",
    "RULE-sync-exp",
    "RULE-sync-K-auto",
    "RULE-sync-K-attention",
    "RULE-sync-K-int8",
)
"""For messages and help; P is 1 to 8, 2 at most for feedback, K a number of steps."""


def find_voter(name: str) -> Contender | None:
    """Return the method of a name; None if it is none of ``VOTER_NAMES``.

    Raises:
        InvalidArgumentError: Its momenta cannot be averaged as it says.
    """
    if name == _LION_CUB:
        return _make_lion_cub()
    synced = _SYNC.fullmatch(name)
    vote = find_vote(synced["rule"] if synced else name)
    if vote is None:
        return None
    if synced is None:
        return _make_voter(name, vote.description, vote, None)
    momentum_sync, how = _read_sync(synced)
    return _make_voter(name, f"{vote.description}; {how}", vote, momentum_sync)


def _make_lion_cub() -> Contender:
    """Take the settings of ``distlion.lion_cub``, which makes real workers, from its defaults."""
    given = {name: each.default for name, each in inspect.signature(lion_cub).parameters.items()}
    description = "Lion Cub (arXiv:2411.16462): quantized votes, momenta averaged"
    vote = NamedVote(QuantizedVote(bits=given["bits"]), LION_BETAS, description)
    return _make_voter(_LION_CUB, description, vote, given["momentum_sync"])


def _make_voter(
    name: str, description: str, vote: NamedVote, momentum_sync: MomentumSync | None
) -> Contender:
    masked = ", cautious=True" if vote.cautious else ""
    return Contender(
        name=name,
        description=description,
        definition=f"{vote.rule!r}, betas={vote.betas}{masked}, {momentum_sync!r}",
        kind=MethodKind.OURS if vote.is_ours else MethodKind.BASELINE,
        base_lr=LION_LR,
        weight_decay=LION_WEIGHT_DECAY,
        enter=partial(
            VirtualVoting.build,
            aggregation=vote.rule,
            betas=vote.betas,
            cautious=vote.cautious,
            momentum_sync=momentum_sync,
        ),
    )


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

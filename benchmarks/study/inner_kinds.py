"""Inner optimizers of local steps that orthogonalize hidden matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from text import SmallGPT
from torch import nn

from distlion.errors import InvalidArgumentError
from distlion.local.inner_optimizers import InnerOptimizers
from distlion.optim import Lion, group_params
from distlion_lab.training.delta_votes import DeltaVotes
from distlion_lab.training.inner import PLAIN_OUTER_SGD
from distlion_lab.training.local_steps import LocalSteps
from distlion_lab.training.means import enter_mean
from distlion_lab.training.periodic import read_local_votes
from distlion_lab.training.workers import MethodRun, VirtualWorkers

MUON, GROUPED_LION = "muon", "grouped-lion"
INNER_KINDS = (MUON, GROUPED_LION)
_OVER = re.compile(rf"(?P<base>.+)-over-(?P<kind>{'|'.join(INNER_KINDS)})")
_DILOCO = re.compile(r"diloco-(?P<every>[1-9]\d*)-plain")
Groups = Sequence[Mapping[str, Any]]


def split_inner(name: str) -> tuple[str, str]:
    """Split ``BASE-over-KIND``; the kind is "" where local steps are AdamW's."""
    match = _OVER.fullmatch(name)
    return (name, "") if match is None else (match["base"], match["kind"])


def build_over(name: str, model: nn.Module, run: MethodRun) -> VirtualWorkers:
    """Build local steps of an inner optimizer by the name of the method.

    Raises:
        InvalidArgumentError: The part before ``-over-`` exchanges no deltas, or by another mean
            than DiLoCo's with a plain outer step.
    """
    base, kind = split_inner(name)
    groups = group_params(model, weight_decay=run.weight_decay, head=find_head(model))
    make = partial(make_inner, kind, groups)
    if votes := read_local_votes(base):
        return DeltaVotes(
            run, every=votes.every, rule=votes.rule, make_inner=make, outer=votes.outer
        )
    if match := _DILOCO.fullmatch(base):
        outer = partial(enter_mean, inner=PLAIN_OUTER_SGD)
        return LocalSteps(run, every=int(match["every"]), make_inner=make, make_outer=outer)
    raise InvalidArgumentError(
        f"method {name!r}: expected local-K-RULE-OUTER or diloco-K-plain before -over-{kind}"
    )


def find_head(model: nn.Module) -> str | None:
    """Return the embedding whose weights are the output's too; None for a last linear layer."""
    return "bytes" if isinstance(model, SmallGPT) else None


def make_inner(kind: str, groups: Groups, run: MethodRun) -> torch.optim.Optimizer:
    """Make a worker's inner optimizer over its own parameters.

    Args:
        kind: One of ``INNER_KINDS``, or "" for AdamW.
        groups: Of the model, from ``group_params``: the first one holds the matrices.
        run: The worker's parameters by name, and the rate.
    """
    if not kind:
        params = [param for _, param in run.params]
        return torch.optim.AdamW(params, run.lr, weight_decay=run.weight_decay)
    own = dict(run.params)
    mine = [{**group, "params": [own[name] for name, _ in group["params"]]} for group in groups]
    if kind == GROUPED_LION:
        return Lion(mine, run.lr)
    bare = [{key: group[key] for key in ("params", "weight_decay")} for group in mine]
    are_matrices = [group.get("orthogonalize", False) for group in mine]
    matrices = [each for each, chosen in zip(bare, are_matrices, strict=True) if chosen]
    others = [each for each, chosen in zip(bare, are_matrices, strict=True) if not chosen]
    # Steps as long as AdamW's (arXiv:2502.16982), so that both take one rate.
    muon = torch.optim.Muon(matrices, run.lr, adjust_lr_fn="match_rms_adamw")
    return InnerOptimizers([muon, torch.optim.AdamW(others, run.lr)])


def make_alone(kind: str, model: nn.Module, run: MethodRun) -> torch.optim.Optimizer:
    """Make the inner optimizer of a kind over the model's own parameters."""
    groups = group_params(model, weight_decay=run.weight_decay, head=find_head(model))
    return make_inner(kind, groups, replace(run, params=list(model.named_parameters())))

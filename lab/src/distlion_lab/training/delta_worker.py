"""A real worker that takes local steps of AdamW and votes every few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distlion.errors import InvalidArgumentError
from distlion.local import LocalSteps
from distlion.votes import SCALED_RULES
from distlion_lab.names import suggest
from distlion_lab.training.delta_votes import PLAIN, DeltaVotes
from distlion_lab.training.inner import ADAMW
from distlion_lab.training.method import Method, MethodKind
from distlion_lab.training.workers import MethodRun, VoteOptions, Voter

DEFAULT_DELTA_RULE = "scaled"
_OF_LOCAL_STEPS = ("exchange", "agreement", "timeouts")


@dataclass(frozen=True)
class DeltaWorker(Voter[LocalSteps]):
    """``LocalSteps`` over AdamW on a bare model.

    Workers differ between two votes. ``scoring`` puts the common point into the model, and
    ``finish`` ends a run with a vote.
    """

    @classmethod
    def build(
        cls,
        model: nn.Module,
        run: MethodRun,
        options: VoteOptions,
        *,
        rule: str,
        every: int,
    ) -> DeltaWorker:
        """Build the optimizer of a run.

        Args:
            model: The model whose parameters the run moves.
            run: The run.
            options: Exchange and diagnostics of votes; overlap and momenta do not apply here.
            rule: Name of a rule for deltas.
            every: Steps from vote to vote, H of ``LocalSteps``.
        """
        taken: dict[str, Any] = {
            name: value for name, value in options.items() if name in _OF_LOCAL_STEPS
        }
        optimizer = LocalSteps(
            ADAMW.make(run),
            every=every,
            aggregation=SCALED_RULES[rule],
            seed=run.seed,
            **taken,
        )
        return cls(model, optimizer)

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits of the last vote for each trainable parameter, divided by H."""
        return self.optimizer.traffic.bits_per_parameter / self.optimizer.every

    @property
    def place(self) -> str:
        """Return the number of votes."""
        votes = self.optimizer.committed_step
        return "1 vote" if votes == 1 else f"{votes} votes"

    def traffic(self) -> dict[str, Any]:
        """Return the optimizer's traffic, which counts votes as steps; bits are for one step."""
        return super().traffic() | {"bits_per_parameter": self.bits_per_parameter}

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Put the common point into the model, and restore this worker's parameters afterwards."""
        common = self.optimizer.common_point  # waits for a vote that is under way
        own = [param for param, _ in self.optimizer.list_pairs()]
        kept = [param.detach().clone() for param in own]
        _copy(common, own)
        try:
            yield
        finally:
            _copy(kept, own)

    def finish(self) -> None:
        """Vote, so that all workers end with the same parameters."""
        self.optimizer.vote()


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def find_delta_rule(rule: str, *, every: int) -> Method:
    """Return the method of a rule for deltas, by its name in ``distlion train --every``.

    Raises:
        InvalidArgumentError: There is no such rule.
    """
    if rule not in SCALED_RULES:
        hint = suggest(rule, SCALED_RULES, all_in="distlion train --help")
        raise InvalidArgumentError(
            f"rule {rule!r} does not vote on deltas, as --every {every} needs it; {hint}"
        )
    how = f"{SCALED_RULES[rule]!r} of deltas of {every} steps of {ADAMW.name}"
    return Method(
        name=f"local-{every}-{rule}-plain",
        description=how,
        definition=how,
        kind=MethodKind.OURS,
        base_lr=ADAMW.base_lr,
        weight_decay=ADAMW.weight_decay,
        enter=partial(
            DeltaVotes, every=every, rule=SCALED_RULES[rule], make_inner=ADAMW.make, outer=PLAIN
        ),
        start=partial(DeltaWorker.build, rule=rule, every=every),
        votes=True,
        train_lr=ADAMW.base_lr,
        train_weight_decay=ADAMW.weight_decay,
    )

"""The common point of virtual workers with local steps; votes on their deltas move it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distlion.errors import InvalidArgumentError
from distlion.local.outer_step import OuterMomentum, OuterStep
from distlion.local.parts import take_turns
from distlion.step.param import VotingParam
from distlion.virtual.cluster import VirtualCluster
from distlion.votes.aggregation import Aggregation


class VirtualCommonPoint(VirtualCluster):
    """A cluster of workers that vote on deltas, with an outer step on the outcome."""

    _takes_scales = True

    def __init__(
        self,
        params: list[tuple[str, nn.Parameter]],
        outer: OuterStep,
        rule: Aggregation | None,
        *,
        parts: int,
        workers: int,
        **options: Any,
    ) -> None:
        self._n_parts = parts
        if workers == 1:
            raise InvalidArgumentError(
                "workers=1: a worker alone has nobody to vote with. Expected 2 or more. Use its "
                "inner optimizer"
            )
        self._moving = [param for _, param in params]
        self._outer_momentum = OuterMomentum(outer, self._moving)
        super().__init__(
            params,
            outer.vote_lr,
            outer.vote_betas,
            aggregation=outer.choose_rule(rule),
            workers=workers,
            exp_avg_dtype=None if outer.kind == "lion" else torch.bfloat16,
            **options,
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the workers, by place."""
        return self._roster.ids

    def list_turns(self) -> list[int]:
        """List the part of each parameter, in order."""
        return [param.turn for param in self._laid_out.params]

    @property
    def turn(self) -> int:
        """The part that votes next."""
        return self.committed_step % self._n_parts

    def _list_trainable(self) -> list[VotingParam]:
        return take_turns(super()._list_trainable(), self._n_parts)

    def _do_step(self) -> None:
        are_voting = [turn == self.turn for turn in self.list_turns()]
        self._outer_momentum.begin(self._moving, are_voting)
        try:
            super()._do_step()
        finally:
            self._outer_momentum.forget()

    def _advance(self) -> None:
        self._outer_momentum.finish(self._moving, self._collection.list_voted())
        super()._advance()

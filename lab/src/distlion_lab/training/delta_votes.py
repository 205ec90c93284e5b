"""Virtual workers of ``LocalSteps``, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from distlion.virtual import VirtualLocalSteps
from distlion.votes import Aggregation
from distlion.wire import AllReduce
from distlion_lab.training.inner import OUTER_LR, OUTER_MOMENTUM
from distlion_lab.training.workers import MethodRun


@dataclass(frozen=True)
class OuterChoice:
    """The outer step of votes on deltas.

    Attributes:
        lr: Constant outer rate, above 0.
        momentum: Nesterov momentum; 0 for none.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __str__(self) -> str:
        if not self.momentum:
            return f"SGD(lr={self.lr})"
        return f"SGD(lr={self.lr}, momentum={self.momentum}, nesterov=True)"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``VirtualLocalSteps``."""
        momentum = {"outer_momentum": self.momentum, "nesterov": self.momentum > 0}
        return {"outer_lr": self.lr, **momentum}


PLAIN, NESTEROV = OuterChoice(), OuterChoice(OUTER_LR, OUTER_MOMENTUM)


class DeltaVotes:
    """N workers that take local steps and vote every K steps, over ``VirtualLocalSteps``.

    Args:
        run: The model, the inner rate and N, 2 or more. The last step of a run ends with a vote.
        every: K, at least 1.
        rule: Rule of the votes on deltas.
        make_inner: Makes a worker's optimizer over its parameters.
        outer: Outer step of the common point on the outcome.

    Raises:
        InvalidArgumentError: ``every``, N or the outer rate is out of range.

    Notes:
        A scheduler sets the inner rate; the outer one is constant.
    """

    def __init__(
        self,
        run: MethodRun,
        *,
        every: int,
        rule: Aggregation,
        make_inner: Callable[[MethodRun], torch.optim.Optimizer],
        outer: OuterChoice,
    ) -> None:
        names = [name for name, _ in run.params]

        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            return make_inner(replace(run, params=list(zip(names, params, strict=True))))

        self._cluster = VirtualLocalSteps(
            run.params,
            make,
            workers=run.workers,
            every=every,
            aggregation=rule,
            seed=run.seed,
            **outer.options,
        )
        self._every, self._steps = every, run.steps
        shape = rule.shape_of(run.n_elements, run.workers)
        self.rounds = AllReduce().cost(shape).rounds

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer of worker 0; the others take its rate."""
        return self._cluster.inners[0]

    @property
    def sent_bytes(self) -> int:
        return self._cluster.traffic.sent_bytes

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits of a vote, averaged over the steps."""
        return self._cluster.outer_optimizer.up_bits_per_parameter * self._votes_per_step

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of a reply, averaged over the steps."""
        return self._cluster.outer_optimizer.down_bits_per_parameter * self._votes_per_step

    @property
    def _votes_per_step(self) -> float:
        return self._cluster.committed_step / max(1, self._cluster.local_step)

    def collect(self, worker: int) -> None:
        """Do the inner step of a worker at the rate that a schedule has set."""
        if 0 <= worker < self._cluster.workers:
            own = self._cluster.inners[worker].param_groups
            for group, scheduled in zip(own, self.optimizer.param_groups, strict=True):
                group["lr"] = scheduled["lr"]
        self._cluster.collect(worker)

    def step(self) -> None:
        """End a step of all workers."""
        self._cluster.step()
        done = self._cluster.local_step
        if done == self._steps and done % self._every:
            self._cluster.vote()

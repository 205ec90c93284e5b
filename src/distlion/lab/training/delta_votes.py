"""Workers of ``LocalSteps`` as a comparison drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from distlion.aggregation import Aggregation
from distlion.exchange import AllReduce
from distlion.lab.training.inner import OUTER_LR, OUTER_MOMENTUM
from distlion.lab.training.workers import MethodRun
from distlion.virtual import VirtualLocalSteps


class DeltaVotes:
    """N workers that take local steps, and vote every K of them; ``VirtualLocalSteps``.

    Args:
        run: The model, the inner rate and N, 2 or more. The last step of a run ends in a vote.
        every: K, at least 1.
        rule: How deltas are voted on.
        make_inner: Makes a worker's optimizer over its parameters.
        is_plain: Whether the outer step is plain, at rate 1; else DiLoCo's, by Nesterov.

    Raises:
        InvalidArgumentError: ``every`` or N is out of range.

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
        is_plain: bool,
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
            outer_lr=1.0 if is_plain else OUTER_LR,
            outer_momentum=0.0 if is_plain else OUTER_MOMENTUM,
            nesterov=not is_plain,
            seed=run.seed,
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
        """Bits of a vote, shared out over the steps."""
        return self._cluster.votes.up_bits_per_parameter * self._votes_per_step

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of a reply, shared out over the steps."""
        return self._cluster.votes.down_bits_per_parameter * self._votes_per_step

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

"""Local steps, and votes on their deltas by the rules of each step: older than ``ScaledVote``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from distlion.votes import RULES, Aggregation
from distlion_lab.training.inner import ADAMW, LION, OUTER_SGD, PLAIN_OUTER_SGD
from distlion_lab.training.local_steps import LocalSteps
from distlion_lab.training.workers import MethodRun, VirtualVoting

_NAME = re.compile(r"(?P<rule>.+)-every-(?P<every>[1-9]\d*)(?P<inner>-lion)?(?P<outer>-plain)?")
_SCALE_BYTES = 4


def build_scaled(name: str, run: MethodRun) -> LocalSteps | None:
    """Build ``RULE-every-K``, with Lion's steps or without outer momentum by what follows.

    Returns:
        The workers; None where the name is another, or the rule not one of each step.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["rule"] not in RULES:
        return None
    inner = LION if match["inner"] else ADAMW
    outer = PLAIN_OUTER_SGD if match["outer"] else OUTER_SGD
    vote = partial(ScaledVotes, rule=RULES[match["rule"]].rule, make_optimizer=outer.make)
    return LocalSteps(run, every=int(match["every"]), make_inner=inner.make, make_outer=vote)


class ScaledVotes:
    """Workers that vote on directions, with one optimizer that steps on the scaled outcomes.

    Equation:
        S = vote(d_1, ..., d_N);  s = mean over workers of mean |d_i|;  step on s S
        (signSGD with majority vote, arXiv:1810.05291; one scale a tensor as in arXiv:1901.09847)

    Every worker would hold the same outcomes and thus the same optimizer, so it is kept once.
    ``VirtualCluster`` counts the votes, without momenta, on parameters that stand in for the given
    ones: they begin an exchange at 0 with a rate of 1 and therefore end it at -S.

    Args:
        run: The parameters, N and the seed of ties.
        rule: Rule of the votes on directions.
        make_optimizer: Builds the optimizer that steps on the outcomes, momentum included.

    Notes:
        Each tensor's scale travels as one float32 to every other worker; a server would return
        their mean. An element that is 0 on all workers moves by a random vote, as everywhere.
    """

    def __init__(
        self,
        run: MethodRun,
        *,
        rule: Aggregation,
        make_optimizer: Callable[[MethodRun], torch.optim.Optimizer],
    ) -> None:
        self.optimizer = make_optimizer(run)
        self._params = [param for _, param in run.params]
        self._outcomes = [nn.Parameter(torch.zeros_like(param)) for param in self._params]
        names = [name for name, _ in run.params]
        standing_in = replace(
            run,
            params=list(zip(names, self._outcomes, strict=True)),
            lr=1.0,
            weight_decay=0.0,
        )
        self._votes = VirtualVoting.build(standing_in, rule, betas=(0.0, 0.0))
        self._scales = [param.new_zeros(()) for param in self._params]
        self._run = run
        self._exchanges = 0

    @property
    def sent_bytes(self) -> int:
        peers = self._run.workers - 1
        scales = _SCALE_BYTES * len(self._params) * peers * self._exchanges
        return self._votes.sent_bytes + scales

    @property
    def up_bits_per_parameter(self) -> float:
        return self._votes.up_bits_per_parameter + self._scale_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self._votes.down_bits_per_parameter + self._scale_bits_per_parameter

    @property
    def _scale_bits_per_parameter(self) -> float:
        return 8 * _SCALE_BYTES * len(self._params) / self._run.n_elements

    @property
    def rounds(self) -> int:
        """Rounds of the votes; the scales travel with them."""
        return self._votes.rounds

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the direction of a worker, and clear it."""
        for place, param in enumerate(self._params):
            assert param.grad is not None  # every parameter has a delta
            self._scales[place] += param.grad.abs().mean() / self._run.workers
            self._outcomes[place].grad, param.grad = param.grad, None
        self._votes.collect(worker)

    @torch.no_grad()
    def step(self) -> None:
        """Count the votes and step."""
        self._votes.step()
        self._exchanges += 1
        for param, outcome, scale in zip(self._params, self._outcomes, self._scales, strict=True):
            param.grad = outcome * -scale
            outcome.zero_()
            scale.zero_()
        self.optimizer.step()
        self.optimizer.zero_grad()

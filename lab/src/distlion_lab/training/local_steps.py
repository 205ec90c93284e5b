"""Workers that take local steps and communicate every K steps: DiLoCo, and votes in its place.

This is an experiment of comparisons, not an option of any optimizer. It is therefore neither in
``optim`` nor with ``VirtualCluster``: only a comparison builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from distlion.errors import InvalidArgumentError
from distlion.votes import Aggregation
from distlion_lab.training.workers import MethodRun, VirtualVoting, VirtualWorkers

_SCALE_BYTES = 4


class LocalSteps:
    """N workers with parameters and an optimizer of their own, which communicate every K steps.

    Equation:
        x_i = K steps of the inner optimizer from the anchor x, with the gradients of worker i
        d_i = x - x_i;  x' = outer step on d_1, ..., d_N;  then x_i = x' for all i
        (DiLoCo, arXiv:2311.08105, Algorithm 1, where the outer step is Nesterov's on the mean)

    The model holds the parameters of the worker whose turn it is. ``collect`` does that worker's
    inner step and puts the next worker's parameters into the model, so a loop needs to know nothing
    of local steps. Between steps the model holds worker 0's parameters; after an exchange they are
    equal on all workers.

    Args:
        run: The model, the inner rate and N. The last step of a run always ends in an exchange.
        every: K, at least 1.
        make_inner: Builds a worker's optimizer over its parameters.
        make_outer: Builds the outer step over the anchor; its gradients are the deltas.

    Raises:
        InvalidArgumentError: ``every`` is less than 1.

    Notes:
        Inner states survive an exchange, as in DiLoCo. A scheduler sets the inner rate; the
        outer one is constant.
    """

    def __init__(
        self,
        run: MethodRun,
        *,
        every: int,
        make_inner: Callable[[MethodRun], torch.optim.Optimizer],
        make_outer: Callable[[MethodRun], VirtualWorkers],
    ) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every is {every}; expected 1 or more")
        self._every, self._steps = every, run.steps
        self._staged = [param for _, param in run.params]
        anchored = _copy_params(run)
        self._anchor = [param for _, param in anchored.params]
        self._outer = make_outer(anchored)
        self._workers = [_Worker.start(run, make_inner) for _ in range(run.workers)]
        self._turn = 0
        self._done = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer of worker 0; the others take its rate."""
        return self._workers[0].optimizer

    @property
    def sent_bytes(self) -> int:
        return self._outer.sent_bytes

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits of an exchange, averaged over the steps."""
        return self._outer.up_bits_per_parameter * self._exchanges_per_step

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of an exchange, averaged over the steps."""
        return self._outer.down_bits_per_parameter * self._exchanges_per_step

    @property
    def rounds(self) -> int:
        """Rounds of an exchange; only the last of K steps has one."""
        return self._outer.rounds

    @property
    def _exchanges_per_step(self) -> float:
        ended = self._done == self._steps
        exchanges = -(-self._done // self._every) if ended else self._done // self._every
        return exchanges / max(1, self._done)

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Do the inner step of a worker, and put the next one's parameters into the model.

        Raises:
            InvalidArgumentError: It is not this worker's turn; nothing has changed.
        """
        if worker != self._turn or worker == len(self._workers):
            raise InvalidArgumentError(
                f"worker {worker} is collected; expected worker {self._turn} of "
                f"{len(self._workers)}, then step()"
            )
        mine = self._workers[worker]
        for param, staged in zip(mine.params, self._staged, strict=True):
            param.grad, staged.grad = staged.grad, None
        mine.step(self.optimizer)
        self._turn += 1
        self._stage(self._workers[self._turn % len(self._workers)].params)

    @torch.no_grad()
    def step(self) -> None:
        """End a step of all workers, every K of them with an exchange.

        Raises:
            InvalidArgumentError: Not all workers were collected.
            NonFiniteError: A worker's parameters are not finite.
        """
        if self._turn != len(self._workers):
            raise InvalidArgumentError(f"step() after {self._turn} of {len(self._workers)} workers")
        self._turn = 0
        self._done += 1
        if self._done % self._every == 0 or self._done == self._steps:
            self._exchange()

    def _exchange(self) -> None:
        for rank, worker in enumerate(self._workers):
            for anchor, param in zip(self._anchor, worker.params, strict=True):
                anchor.grad = anchor - param
            self._outer.collect(rank)
        self._outer.step()
        for worker in self._workers:
            for anchor, param in zip(self._anchor, worker.params, strict=True):
                param.copy_(anchor)
        self._stage(self._anchor)

    def _stage(self, params: Sequence[Tensor]) -> None:
        for staged, param in zip(self._staged, params, strict=True):
            staged.copy_(param)


@dataclass(frozen=True)
class _Worker:
    """A worker between two of its turns.

    Attributes:
        params: The worker's own parameters.
        optimizer: The optimizer over these.
    """

    params: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(
        cls, run: MethodRun, make_inner: Callable[[MethodRun], torch.optim.Optimizer]
    ) -> _Worker:
        """Begin with the parameters of the model."""
        mine = _copy_params(run)
        return cls([param for _, param in mine.params], make_inner(mine))

    def step(self, scheduled: torch.optim.Optimizer) -> None:
        """Step at the rate of the optimizer that a scheduler sets."""
        for group, other in zip(self.optimizer.param_groups, scheduled.param_groups, strict=True):
            group["lr"] = other["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _copy_params(run: MethodRun) -> MethodRun:
    copies = [(name, nn.Parameter(param.detach().clone())) for name, param in run.params]
    return replace(run, params=copies)


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

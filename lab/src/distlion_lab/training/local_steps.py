"""Workers that take local steps and communicate every K steps, as DiLoCo does.

This is an experiment of comparisons, not an option of any optimizer. It is therefore neither in
``optim`` nor with ``VirtualCluster``: only a comparison builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from distlion.errors import InvalidArgumentError
from distlion_lab.training.workers import MethodRun, VirtualWorkers


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

"""The cost of votes and the agreement of workers, logged to TensorBoard or Weights & Biases.

The caller imports the package and hands over a writer or a run; none is imported here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.integrations.frameworks import Voter
from distlion.step.diagnostics import Diagnosis

__all__ = ["VoteLog", "VoteMeter", "log_to_tensorboard", "log_to_wandb"]

PREFIX = "votes"
"""Prefix of every name, so that dashboards group them."""

_OF_DIAGNOSES = ("margin", "ties", "agreement", "coherence")


class ScalarWriter(Protocol):
    """The method needed of ``torch.utils.tensorboard.SummaryWriter``, or of one like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Log a number."""
        ...


class Run(Protocol):
    """The methods needed of a run of ``wandb.init``."""

    def define_metric(self, name: str, *, step_metric: str) -> Any:
        """Set the x axis of a metric."""
        ...

    def log(self, data: dict[str, Any]) -> Any:
        """Log numbers."""
        ...


def _find_voter(optimizer: Any) -> Voter:
    """Return the optimizer without the wrapper that Accelerate puts around it."""
    while not hasattr(optimizer, "diagnostics") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "diagnostics"):
        raise UnsupportedTypeError(
            f"optimizer is a {type(optimizer).__name__}, which does not vote; expected a "
            "distlion.DistributedLion or a distlion.LocalSteps"
        )
    voter: Voter = optimizer
    return voter


class VoteMeter:
    """Measure the steps of an optimizer from now on.

    Args:
        optimizer: Optimizer to measure; it gets two hooks, until ``close``.

    Raises:
        UnsupportedTypeError: It does not vote.

    Example:
        >>> meter = VoteMeter(optimizer)
        >>> for batch in loader:
        ...     train(batch)  # with optimizer.step()
        ...     print(meter.read())
    """

    def __init__(self, optimizer: Voter) -> None:
        self._optimizer = optimizer = _find_voter(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        self._last_diagnosis = self._find_last_diagnosis()
        self._began_s = self._ended_s = time.perf_counter()
        self._step_s: list[float] = []
        self._interval_s: list[float] = []

    def read(self) -> dict[str, float]:
        """Return measurements of the steps since the last call.

        Returns:
            ``step_s``: mean seconds in ``optimizer.step()``, including waits for other workers.
            ``interval_s``: mean seconds from the end of one step to the end of the next.
            ``sent_bytes``: this worker's bytes in the last step. ``sent_bytes_total``: in all
            steps. ``bits_per_parameter``: bits sent in the last step for each trainable element.
            ``members``, ``epoch``, ``epochs_formed``, ``members_lost``, ``forming_s``: as in
            ``distlion.crew.CrewTraffic``; only in a crew, where ``step_s`` includes the seconds of
            forming an epoch.
            ``grad_norm``: ``optimizer.grad_norm`` of the last step; only with ``clip_norm``.
            ``margin``, ``ties``, ``agreement``, ``coherence``: means over parameters of the last
            diagnosis (``distlion.step.Diagnosis``); only with ``agreement``, once for each
            diagnosis. The result is empty if there was no step.
        """
        if not self._step_s:
            return {}
        numbers = {
            "step_s": statistics.fmean(self._step_s),
            "interval_s": statistics.fmean(self._interval_s),
            **self._optimizer.traffic.list_scalars(),
        }
        grad_norm = getattr(self._optimizer, "grad_norm", None)  # ``LocalSteps`` has none
        if grad_norm is not None:
            numbers["grad_norm"] = grad_norm
        self._step_s.clear()
        self._interval_s.clear()
        return numbers | self._read_diagnosis()

    def close(self) -> None:
        """Remove the hooks; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        now_s = time.perf_counter()
        self._step_s.append(now_s - self._began_s)
        self._interval_s.append(now_s - self._ended_s)
        self._ended_s = now_s

    def _find_last_diagnosis(self) -> list[Diagnosis]:
        found = self._optimizer.diagnostics()
        return [each for each in found if each.step == found[-1].step]

    def _read_diagnosis(self) -> dict[str, float]:
        found = self._find_last_diagnosis()
        if found == self._last_diagnosis:
            return {}
        self._last_diagnosis = found
        return {
            name: statistics.fmean(getattr(each, name) for each in found) for name in _OF_DIAGNOSES
        }


Emit = Callable[[int, Mapping[str, float]], None]
"""Called with the number of committed steps, and numbers by prefixed name."""


class VoteLog:
    """A context manager that hands the numbers of ``VoteMeter`` to a logger every few steps.

    Args:
        optimizer: Optimizer to measure.
        emit: The logger.
        every: Steps of this optimizer between calls of ``emit``.
        prefix: Prefix of all names; use a different one for each of several optimizers.

    Raises:
        InvalidArgumentError: ``every`` is below 1.
    """

    def __init__(
        self, optimizer: Voter, emit: Emit, *, every: int = 10, prefix: str = PREFIX
    ) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every is {every!r}, expected 1 or more")
        self._optimizer, self._emit = _find_voter(optimizer), emit
        self._every, self._prefix = every, prefix
        self._since = 0
        self._meter = VoteMeter(self._optimizer)
        # After the meter's hook, so that the logged step has been measured.
        self._handle = self._optimizer.register_step_post_hook(self._count)

    def __enter__(self) -> VoteLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Log the remaining steps and release the optimizer; the writer stays open."""
        self._log()
        self._handle.remove()
        self._meter.close()

    def _count(self, *_: Any) -> None:
        self._since += 1
        if self._since >= self._every:
            self._log()

    def _log(self) -> None:
        self._since = 0
        numbers = self._meter.read()
        if numbers:
            named = {f"{self._prefix}/{name}": value for name, value in numbers.items()}
            self._emit(self._optimizer.committed_step, named)


def log_to_tensorboard(
    optimizer: Voter, writer: ScalarWriter, *, every: int = 10, prefix: str = PREFIX
) -> VoteLog:
    """Log to TensorBoard from the calling worker, usually rank 0 alone.

    Args:
        optimizer: Optimizer to measure.
        writer: A ``torch.utils.tensorboard.SummaryWriter``.
        every: Steps between logs, as in ``VoteLog``.
        prefix: Prefix of names, as in ``VoteLog``.

    Raises:
        InvalidArgumentError: ``every`` is below 1.

    Example:
        >>> if dist.get_rank() == 0:
        ...     votes = log_to_tensorboard(optimizer, SummaryWriter("runs/first"))
    """

    def emit(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return VoteLog(optimizer, emit, every=every, prefix=prefix)


def log_to_wandb(optimizer: Voter, run: Run, *, every: int = 10, prefix: str = PREFIX) -> VoteLog:
    """Log to Weights & Biases from the calling worker, usually rank 0 alone.

    Args:
        optimizer: Optimizer to measure.
        run: Run from ``wandb.init``. Charts are drawn against ``PREFIX/committed_step``, so
            other calls of ``run.log`` do not matter.
        every: Steps between logs, as in ``VoteLog``.
        prefix: Prefix of names, as in ``VoteLog``.

    Raises:
        InvalidArgumentError: ``every`` is below 1.
    """
    against = f"{prefix}/committed_step"

    def emit(step: int, numbers: Mapping[str, float]) -> None:
        run.log({**numbers, against: step})

    log = VoteLog(optimizer, emit, every=every, prefix=prefix)
    run.define_metric(f"{prefix}/*", step_metric=against)
    return log

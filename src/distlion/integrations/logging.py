"""What voting costs and how far workers agree, where people look: TensorBoard, Weights & Biases.

The packages are those of the caller, who hands over a writer or a run; none is imported here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from distlion.errors import InvalidArgumentError
from distlion.integrations.frameworks import Voter
from distlion.options import Diagnosis

__all__ = ["VoteLog", "VoteMeter", "log_to_tensorboard", "log_to_wandb"]

PREFIX = "votes"
"""Of every name, so that dashboards put them side by side."""

_OF_DIAGNOSES = ("margin", "ties", "agreement", "dispersion")


class ScalarWriter(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``, or one with its methods."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Note a number."""
        ...


class Run(Protocol):
    """What is used of a run of ``wandb.init``."""

    def define_metric(self, name: str, *, step_metric: str) -> Any:
        """Say against what a metric is drawn."""
        ...

    def log(self, data: dict[str, Any]) -> Any:
        """Note numbers."""
        ...


class VoteMeter:
    """Measure the steps of an optimizer from now on.

    Args:
        optimizer: Whose steps; it gets two hooks, until ``close``.

    Example:
        >>> meter = VoteMeter(optimizer)
        >>> for batch in loader:
        ...     train(batch)  # with optimizer.step()
        ...     print(meter.read())
    """

    def __init__(self, optimizer: Voter) -> None:
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        self._last_diagnosis = self._find_last_diagnosis()
        self._began_s = self._ended_s = time.perf_counter()
        self._step_s: list[float] = []
        self._interval_s: list[float] = []

    def read(self) -> dict[str, float]:
        """Return what the steps since the last call were like.

        Returns:
            ``step_s``: mean seconds in ``optimizer.step()``, waiting for others included.
            ``interval_s``: mean seconds from the end of one to the end of the next.
            ``sent_bytes``: of this worker, in the last step. ``sent_bytes_total``: in all.
            ``bits_per_parameter``: sent in the last step for each trainable element.
            ``members``, ``epoch``, ``epochs_formed``, ``members_lost``, ``forming_s``: as of
            ``distlion.crew.CrewTraffic``; only in a crew, where ``step_s`` includes the seconds of
            forming an epoch.
            ``grad_norm``: ``optimizer.grad_norm`` of the last step; only with ``clip_norm``.
            ``margin``, ``ties``, ``agreement``, ``dispersion``: means over parameters of the last
            diagnosis (``distlion.Diagnosis``); only with ``diagnose_every``, once for each. Empty
            where there was no step.
        """
        if not self._step_s:
            return {}
        numbers = {
            "step_s": statistics.fmean(self._step_s),
            "interval_s": statistics.fmean(self._interval_s),
            **self._optimizer.traffic.list_scalars(),
        }
        grad_norm = getattr(self._optimizer, "grad_norm", None)  # local steps are the inner's own
        if grad_norm is not None:
            numbers["grad_norm"] = grad_norm
        self._step_s.clear()
        self._interval_s.clear()
        return numbers | self._read_diagnosis()

    def close(self) -> None:
        """Take the hooks away; a second call does nothing."""
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
"""Called with the number of committed steps, and numbers by name with the prefix."""


class VoteLog:
    """Hand what ``VoteMeter`` measures to a logger every few steps; a context manager.

    Args:
        optimizer: Whose steps.
        emit: The logger.
        every: Steps of this optimizer from one call of ``emit`` to the next.
        prefix: Of all names; another one for each of several optimizers.

    Raises:
        InvalidArgumentError: ``every`` is below 1.
    """

    def __init__(
        self, optimizer: Voter, emit: Emit, *, every: int = 10, prefix: str = PREFIX
    ) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every is {every!r}, expected 1 or more")
        self._optimizer, self._emit = optimizer, emit
        self._every, self._prefix = every, prefix
        self._since = 0
        self._meter = VoteMeter(optimizer)
        # After the meter's, so that the step that is logged has been measured.
        self._handle = optimizer.register_step_post_hook(self._count)

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
        """Log what was not logged yet, and let go of the optimizer; its writer stays open."""
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
    """Log to TensorBoard from the worker that calls this, which is mostly rank 0 alone.

    Args:
        optimizer: Whose steps.
        writer: A ``torch.utils.tensorboard.SummaryWriter``.
        every: As of ``VoteLog``.
        prefix: As of ``VoteLog``.

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
    """Log to Weights & Biases from the worker that calls this, which is mostly rank 0 alone.

    Args:
        optimizer: Whose steps.
        run: What ``wandb.init`` returned. Charts are drawn against ``PREFIX/committed_step``, so
            that it does not matter when and how often others call ``run.log``.
        every: As of ``VoteLog``.
        prefix: As of ``VoteLog``.

    Raises:
        InvalidArgumentError: ``every`` is below 1.
    """
    against = f"{prefix}/committed_step"

    def emit(step: int, numbers: Mapping[str, float]) -> None:
        run.log({**numbers, against: step})

    log = VoteLog(optimizer, emit, every=every, prefix=prefix)
    run.define_metric(f"{prefix}/*", step_metric=against)
    return log

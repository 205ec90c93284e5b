"""Keep the series of a run for its record, including the steps before a resume."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distlion.errors import CheckpointError
from distlion_lab.baselines.ring import ring_all_reduce_bytes
from distlion_lab.training.workers import RealWorker, gather_rows

_LOSS_SERIES = ("step", "seconds", "loss", "lr")
_EVALUATION_SERIES = ("step", "seconds", "loss", "accuracy")
# Fields of a traffic account about the last step alone.
_OF_LAST_STEP = ("last_sent_bytes", "last_received_bytes", "last_messages", "bits_per_parameter")


class Series:
    """The series of a run so far.

    Attributes:
        losses: Series ``step``, ``seconds``, ``loss``, ``lr``.
        evaluations: Series ``step``, ``seconds``, ``loss``, ``accuracy``.
    """

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {name: [] for name in _LOSS_SERIES}
        self.evaluations: dict[str, list[float]] = {name: [] for name in _EVALUATION_SERIES}
        self.start_clock()

    def start_clock(self) -> None:
        """Count seconds from here."""
        self._start_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds spent on the run so far, without a resume's repeated steps and waiting."""
        return round(time.perf_counter() - self._start_s, 6)

    def add_step(self, step: int, *, loss: float, lr: float) -> None:
        """Note a step, counted from 0."""
        row = {"step": step, "seconds": self.seconds, "loss": loss, "lr": lr}
        for name, value in row.items():
            self.losses[name].append(value)

    def add_evaluation(self, done: int, *, loss: float, accuracy: float) -> None:
        """Note an evaluation after ``done`` steps."""
        row = {"step": done, "seconds": self.seconds, "loss": loss, "accuracy": accuracy}
        for name, value in row.items():
            self.evaluations[name].append(value)


class History(Series):
    """The series and accounts of a run on one worker.

    Args:
        worker: Counter of the bytes that this process has sent.
        world_size: Number of workers.

    Notes:
        Losses are this worker's until ``settle``, and means over workers from then on.
    """

    def __init__(self, worker: RealWorker, world_size: int) -> None:
        super().__init__()
        self._worker = worker
        self._world_size = world_size
        self._settled = 0
        self._traffic_before: dict[str, Any] = {}
        self._diagnostics_before: list[dict[str, Any]] = []
        # [steps, workers] of each stretch between changes of the number of workers.
        self._stretches: list[list[int]] = [[0, world_size]]

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this worker, and by the worker of its rank before a resume."""
        return int(self._traffic_before.get("sent_bytes", 0)) + self._worker.sent_bytes

    @property
    def bits_per_parameter(self) -> float:
        """Bits of the last step, as the worker counts them."""
        return float(self.traffic()["bits_per_parameter"])

    def add_step(self, step: int, *, loss: float, lr: float) -> None:
        super().add_step(step, loss=loss, lr=lr)
        self._stretches[-1][0] += 1

    def settle(self) -> None:
        """Replace this worker's losses by means over all; every worker must call it."""
        own = torch.tensor(self.losses["loss"][self._settled :], dtype=torch.float64, device="cpu")
        if own.numel():
            self.losses["loss"][self._settled :] = gather_rows(own).mean(dim=0).tolist()
            self._settled = len(self.losses["loss"])

    def traffic(self) -> dict[str, Any]:
        """Return the worker's account, including the steps before a resume."""
        before, now = self._traffic_before, self._worker.traffic()
        joined = {
            name: before.get(name, 0) + value if name not in _OF_LAST_STEP else value
            for name, value in now.items()
        }
        if before and not now["steps"]:
            joined |= {name: before[name] for name in _OF_LAST_STEP if name in before}
        return joined

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return the diagnoses of votes, including those before a resume."""
        return self._diagnostics_before + self._worker.diagnostics()

    def full_precision_bytes(self, trainable: int) -> int:
        """Count the bytes that a ring all-reduce of fp32 gradients would have sent so far."""
        return sum(
            ring_all_reduce_bytes(trainable * steps, workers) for steps, workers in self._stretches
        )

    def to_extra(self) -> dict[str, Any]:
        """Return the history as types of a checkpoint; every worker must call it."""
        self.settle()
        return {
            "seconds": self.seconds,
            "losses": {name: _pack(values) for name, values in self.losses.items()},
            "evaluations": {name: _pack(values) for name, values in self.evaluations.items()},
            "traffic": self.traffic(),
            "diagnostics": self.diagnostics(),
            "stretches": [list(stretch) for stretch in self._stretches],
        }

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore the history that ``to_extra`` returned.

        Raises:
            CheckpointError: ``extra`` is something else.
        """
        try:
            self.losses = {name: _unpack(extra["losses"][name]) for name in _LOSS_SERIES}
            self.evaluations = {
                name: _unpack(extra["evaluations"][name]) for name in _EVALUATION_SERIES
            }
            self._start_s = time.perf_counter() - float(extra["seconds"])
            self._traffic_before = dict(extra["traffic"])
            self._diagnostics_before = list(extra["diagnostics"])
            self._stretches = [[int(steps), int(workers)] for steps, workers in extra["stretches"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint was not saved by distlion train: its history cannot be read "
                f"({error!r})"
            ) from error
        self._settled = len(self.losses["loss"])
        if self._stretches[-1][1] != self._world_size:
            self._stretches.append([0, self._world_size])


def _pack(values: list[float]) -> Tensor:
    whole = all(isinstance(value, int) for value in values)
    return torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device="cpu")


def _unpack(values: Tensor) -> list[float]:
    unpacked: list[float] = values.tolist()
    return unpacked

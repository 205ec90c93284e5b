"""The run loop of virtual workers: each computes a gradient in turn, then all step together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from distlion.errors import NonFiniteError
from distlion_lab.errors import DataError
from distlion_lab.tasks.base import Batch, Task, score_batch
from distlion_lab.training.device import move_batch
from distlion_lab.training.gradient import compute_gradient
from distlion_lab.training.loop import lr_factor
from distlion_lab.training.methods import find_method
from distlion_lab.training.record import describe_versions
from distlion_lab.training.run_record import RunRecord
from distlion_lab.training.run_settings import RunSettings
from distlion_lab.training.workers import MethodRun, digest_parameters, name_matrices

# Often enough for a median, rare enough not to hold up a GPU.
_TIME_EVERY = 8

Observer = Callable[[int], None]


def split_heldout(task: Task) -> tuple[list[Batch], list[Batch]]:
    """Split the evaluation batches: even ones choose the learning rate, odd ones are reported.

    Returns:
        Validation and test batches.

    Raises:
        DataError: There is only one batch.
    """
    batches = list(task.heldout_batches())
    if len(batches) < 2:
        raise DataError(
            f"the task {task.name} has {len(batches)} evaluation batches; expected 2 or more, for "
            "validation and test"
        )
    return batches[0::2], batches[1::2]


class VirtualLoop:
    """Train a task with virtual workers.

    Args:
        settings: The run's settings.
        task: The data and model.
        observe: Called after each step with the number of steps done.

    Raises:
        DataError: The evaluation batches cannot be split.
        InvalidArgumentError: The method is unknown.
    """

    def __init__(self, settings: RunSettings, task: Task, observe: Observer) -> None:
        self._settings = settings
        self._task = task
        self._observe = observe
        self._device = torch.device(settings.device)
        self._model = task.build_model(seed=settings.seed).to(self._device)
        self._params = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._workers = find_method(settings.method).enter(
            MethodRun(
                params=self._params,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                workers=settings.workers,
                steps=settings.steps,
                seed=settings.seed,
                matrices=name_matrices(self._model),
            )
        )
        factor = partial(lr_factor, settings=settings.to_training())
        self._schedule = LambdaLR(self._workers.optimizer, factor)
        self._validation, self._test = (
            [move_batch(batch, self._device) for batch in part] for part in split_heldout(task)
        )
        self._series = _Series()
        self._done = 0
        self._compute_s: list[float] = []

    def run(self) -> RunRecord:
        """Train from the first step to the last, or until a loss or gradient is not finite.

        Returns:
            The record; ``diverged`` is None if the run came to its end.
        """
        start_s = time.perf_counter()
        diverged = None
        try:
            self._train()
        except NonFiniteError as error:
            diverged = {"step": self._done, "message": str(error)}
        return self._conclude(diverged, wall_s=time.perf_counter() - start_s)

    def _train(self) -> None:
        settings = self._settings
        losses: list[float] = []
        self._evaluate(losses)
        while self._done < settings.steps:
            losses.append(self._step())
            self._done += 1
            if self._done % settings.eval_every == 0 or self._done == settings.steps:
                self._evaluate(losses)
                losses.clear()
            self._observe(self._done)

    def _step(self) -> float:
        """Let all workers vote once; return the mean of their losses."""
        losses = []
        for worker in range(self._settings.workers):
            losses.append(self._backward(worker))
            self._workers.collect(worker)
        loss = float(torch.stack(losses).double().mean())
        self._check_finite(loss, "training")
        self._workers.step()
        self._schedule.step()
        return loss

    def _backward(self, worker: int) -> Tensor:
        """Compute a worker's gradient; return its loss, (), detached."""
        settings = self._settings
        batch = self._task.training_batch(
            seed=settings.seed, step=self._done, rank=worker, world_size=settings.workers
        )
        timed = worker == 0 and self._done % _TIME_EVERY == 0
        start_s = self._read_clock() if timed else 0.0
        loss = compute_gradient(
            self._model,
            batch,
            seed=settings.seed,
            step=self._done,
            rank=worker,
            device=self._device,
        )
        if timed:
            self._compute_s.append(self._read_clock() - start_s)
        return loss

    def _read_clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _evaluate(self, losses: Sequence[float]) -> None:
        validation = self._score(self._validation)
        test = self._score(self._test)
        self._series.add(
            step=self._done,
            train_loss=math.fsum(losses) / len(losses) if losses else None,
            validation_loss=validation[0],
            validation_accuracy=validation[1],
            test_loss=test[0],
            test_accuracy=test[1],
            sent_bytes=self._workers.sent_bytes,
        )

    def _score(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Return nats per prediction and the share of correct predictions."""
        scores = [score_batch(self._model, batch) for batch in batches]
        count = sum(score.count for score in scores)
        loss = math.fsum(score.loss_sum for score in scores) / count
        self._check_finite(loss, "evaluation")
        return loss, sum(score.correct for score in scores) / count

    def _check_finite(self, loss: float, kind: str) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(f"the {kind} loss is {loss}", step=self._done)

    def _conclude(self, diverged: dict[str, Any] | None, *, wall_s: float) -> RunRecord:
        return RunRecord(
            settings=self._settings.to_json(),
            versions=describe_versions(),
            task=self._task.describe(),
            trainable_parameters=sum(param.numel() for _, param in self._params),
            diverged=diverged,
            up_bits_per_parameter=self._workers.up_bits_per_parameter,
            down_bits_per_parameter=self._workers.down_bits_per_parameter,
            sent_bytes_per_step=self._workers.sent_bytes / max(1, self._done),
            rounds=self._workers.rounds,
            parameters_sha256=digest_parameters(self._model),
            series=self._series.columns,
            timing={
                "wall_s": round(wall_s, 6),
                "compute_s": median(self._compute_s) if self._compute_s else None,
            },
        )


class _Series:
    """Columns that grow by a row at each evaluation."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}

    def add(self, **row: float | None) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)

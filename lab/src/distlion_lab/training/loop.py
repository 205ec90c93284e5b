"""The run loop of one worker: forward, backward, step, and now and then an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distlion.errors import NonFiniteError
from distlion.optim import DistributedLion
from distlion.step import Agreement, MomentumSync, Timeouts
from distlion_lab.tasks.base import Task, score_batch
from distlion_lab.training.checkpoints import CheckpointSettings, RunCheckpoints
from distlion_lab.training.device import find_device, move_batch
from distlion_lab.training.gradient import compute_gradient
from distlion_lab.training.history import History, Series
from distlion_lab.training.record import Record, describe_versions
from distlion_lab.training.train_settings import (
    DEFAULT_STEP_TIMEOUT_S,
    Schedule,
    TrainSettings,
)
from distlion_lab.training.workers import (
    MethodRun,
    RealWorker,
    VoteOptions,
    find_exchange,
    gather_rows,
    name_matrices,
)

FINAL_LOSS_STEPS = 20
_COSINE_FLOOR = 0.1


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as rank 0 sees it.

    Args:
        step: Steps done, 0 before the first.
        steps: Steps in all.
        seconds: Seconds since the start of the loop.
        train_loss: Loss of rank 0's last batch, in nats; None before the first step. In a run that
            has just been resumed, the mean over all ranks.
        validation_loss: Validation loss in nats, if the model has just been evaluated.
        unit: Name of the unit that throughput counts.
        units: Units on which all workers have trained since this process began, or was resumed.
        training_s: Seconds of their steps, without evaluations and checkpoints.
        sent_bytes: Bytes that this worker has sent so far.
        bits_per_parameter: Bits of the last step.
        note: A note for the user at this point; mostly empty.
        members: Members of a crew, or the number of votes with local steps; else empty.
    """

    step: int
    steps: int
    seconds: float
    train_loss: float | None
    validation_loss: float | None
    unit: str
    units: int
    training_s: float
    sent_bytes: int
    bits_per_parameter: float
    note: str = ""
    members: str = ""


Observer = Callable[[Progress], None]


def lr_factor(step: int, *, settings: TrainSettings) -> float:
    """Return the factor of ``lr`` at a step counted from 0.

    Equation:
        (s + 1) / w while s < w, then 1, or 0.1 + 0.9 (1 + cos(pi (s - w) / (T - w))) / 2
        s is ``step``, w is ``warmup_steps``, T is ``steps``.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule is Schedule.CONSTANT:
        return 1.0
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return _COSINE_FLOOR + (1 - _COSINE_FLOOR) * (1 + math.cos(math.pi * done)) / 2


def start_worker(
    settings: TrainSettings,
    model: nn.Module,
    make_optimizer: Callable[..., DistributedLion] = DistributedLion,
) -> RealWorker:
    """Start this process's worker of a run, in the default process group or in a crew."""
    run = MethodRun(
        params=list(model.named_parameters()),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        workers=settings.workers,
        steps=settings.steps,
        seed=settings.seed,
        warmup_steps=settings.warmup_steps,
        make_optimizer=make_optimizer,
        matrices=name_matrices(model),
    )
    every = settings.momentum_sync_every
    options = VoteOptions(
        exchange=find_exchange(settings.exchange),
        momentum_sync=None if every is None else MomentumSync(every=every),
        overlap=settings.overlap.choice,
        agreement=Agreement(settings.diagnose_every, settings.on_disagreement.choice),
        timeouts=Timeouts(step_s=settings.step_timeout_s or DEFAULT_STEP_TIMEOUT_S),
    )
    assert settings.method.start is not None  # the settings checked it
    return settings.method.start(model, run, options)


def score_heldout(model: nn.Module, task: Task, device: torch.device, mine: slice) -> Tensor:
    """Score some of the validation batches: (batches, 3) float64, with zeros for the others.

    A row holds the sum of losses, the number of correct predictions, and the number of predictions.
    """
    batches = task.heldout_batches()
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device="cpu")
    for index in range(len(batches))[mine]:
        score = score_batch(model, move_batch(batches[index], device))
        sums[index] = torch.tensor(
            [score.loss_sum, score.correct, score.count], dtype=torch.float64, device="cpu"
        )
    return sums


def conclude_scores(sums: Tensor) -> tuple[float, float]:
    """Return mean loss and accuracy over rows, added in their order."""
    rows = sums.tolist()
    loss_sum, correct, count = (math.fsum(row[field] for row in rows) for field in range(3))
    return loss_sum / count, correct / count


def check_finite(loss: float, kind: str, settings: TrainSettings, *, rank: int, step: int) -> None:
    """Raise NonFiniteError if a loss is not finite."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the {kind} loss is {loss}; try a smaller lr than {settings.lr}", rank=rank, step=step
        )


def make_record(settings: TrainSettings, task: Task, series: Series, **measured: Any) -> Record:
    """Make the record of a run; ``measured`` has what a crew measures in another way."""
    return Record(
        settings=settings.to_json(),
        versions=describe_versions(),
        task=task.describe(),
        initial_validation_loss=series.evaluations["loss"][0],
        final_validation_loss=series.evaluations["loss"][-1],
        final_validation_accuracy=series.evaluations["accuracy"][-1],
        losses=series.losses,
        evaluations=series.evaluations,
        **measured,
    )


class TrainingLoop:
    """Train a task over the default process group.

    Args:
        settings: The run's settings; ``workers`` is the group's size.
        task: The data and model.
        observe: Called on rank 0 after every step and evaluation.
        checkpoints: Settings of checkpoints; None for none.
        run_dir: Folder of the run, with its checkpoints.
    """

    def __init__(
        self,
        settings: TrainSettings,
        task: Task,
        observe: Observer,
        *,
        checkpoints: CheckpointSettings | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self._settings = settings
        self._task = task
        self._observe = observe
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._device = find_device(settings.device, self._rank)
        model = task.build_model(seed=settings.seed).to(self._device)
        self._worker = start_worker(settings, model)
        self._schedule = LambdaLR(self._worker.optimizer, partial(lr_factor, settings=settings))
        self._history = History(self._worker, self._world_size)
        self._own_steps = 0
        self._training_s = 0.0
        self._checkpoints: RunCheckpoints | None = None
        if checkpoints is not None and checkpoints.are_used and run_dir is not None:
            self._checkpoints = RunCheckpoints(
                checkpoints,
                run_dir,
                training=settings,
                worker=self._worker,
                schedule=self._schedule,
                history=self._history,
                task=task,
            )

    def run(self) -> Record:
        """Train from the first step, or the one after the latest checkpoint, to the last.

        Returns:
            The record; it is equal on all ranks but for times, and for the account of traffic and
            the sample, which are rank 0's.

        Raises:
            NonFiniteError: The loss is no longer finite.
            CheckpointError: The run cannot be resumed.
            StepError: A step failed, as DistributedLion reports it.
        """
        self._history.start_clock()
        start, note = self._checkpoints.resume() if self._checkpoints else (0, "")
        if start == 0:
            self._evaluate(0)
        self._report(start, validation_loss=self._history.evaluations["loss"][-1], note=note)
        for step in range(start, self._settings.steps):
            self._step(step)
            done = step + 1
            if done == self._settings.steps:
                self._worker.finish()
            due = done % self._settings.eval_every == 0 or done == self._settings.steps
            self._report(done, validation_loss=self._evaluate(done) if due else None)
            problem = self._checkpoints.save_if_due(done) if self._checkpoints else ""
            if problem:
                self._report(done, note=problem)
        return self._conclude()

    def _step(self, step: int) -> None:
        start_s = time.perf_counter()
        seed, device = self._settings.seed, self._device
        batch = self._task.training_batch(
            seed=seed, step=step, rank=self._rank, world_size=self._world_size
        )
        model = self._worker.model
        found = compute_gradient(model, batch, seed=seed, step=step, rank=self._rank, device=device)
        lr = float(self._schedule.get_last_lr()[0])
        self._worker.optimizer.step()
        self._worker.optimizer.zero_grad()
        self._schedule.step()
        loss = float(found)
        # Checked after the step: in a step, ranks agree on errors of their gradients.
        self._check_finite(loss, "training", step)
        self._history.add_step(step, loss=loss, lr=lr)
        self._own_steps += 1
        self._training_s += time.perf_counter() - start_s

    def _evaluate(self, done: int) -> float:
        """Score validation batch i on rank i mod N, and add the sums in batch order.

        The result is bitwise identical for any number of ranks.
        """
        model, mine = self._worker.model, slice(self._rank, None, self._world_size)
        with self._worker.scoring():
            own = score_heldout(model, self._task, self._device, mine)
        # One rank fills a row and the others add zeros to it, which is exact.
        loss, accuracy = conclude_scores(gather_rows(own).sum(dim=0))
        self._check_finite(loss, "validation", done)
        self._history.add_evaluation(done, loss=loss, accuracy=accuracy)
        return loss

    def _check_finite(self, loss: float, kind: str, step: int) -> None:
        check_finite(loss, kind, self._settings, rank=self._rank, step=step)

    def _report(self, done: int, *, validation_loss: float | None = None, note: str = "") -> None:
        if self._rank != 0:
            return
        history, seconds = self._history, self._history.seconds
        units = self._own_steps * self._task.units_per_batch * self._world_size
        self._observe(
            Progress(
                step=done,
                steps=self._settings.steps,
                seconds=seconds,
                train_loss=history.losses["loss"][-1] if done else None,
                validation_loss=validation_loss,
                unit=self._task.unit,
                units=units,
                training_s=self._training_s,
                sent_bytes=history.sent_bytes,
                bits_per_parameter=history.bits_per_parameter,
                note=note,
                members=self._worker.place,
            )
        )

    def _sample(self) -> dict[str, str]:
        if self._rank != 0:
            return {}
        return self._task.sample(self._worker.model, seed=self._settings.seed)

    def _conclude(self) -> Record:
        history = self._history
        wall_s = history.seconds
        history.settle()
        losses = torch.tensor(history.losses["loss"], dtype=torch.float64, device="cpu")
        sent = gather_rows(torch.tensor(history.sent_bytes, dtype=torch.int64, device="cpu")).max()
        params = [p for p in self._worker.model.parameters() if p.requires_grad]
        trainable = sum(param.numel() for param in params)
        return make_record(
            self._settings,
            self._task,
            history,
            trainable_parameters=trainable,
            world_size=self._world_size,
            final_train_loss=float(losses[-FINAL_LOSS_STEPS:].mean()),
            wall_s=wall_s,
            sent_bytes_per_worker=int(sent),
            full_precision_bytes_per_worker=history.full_precision_bytes(trainable),
            bits_per_parameter=history.bits_per_parameter,
            replicas_equal=self._worker.replicas_equal(),
            traffic=history.traffic(),
            diagnostics=history.diagnostics(),
            sample=self._sample(),
        )

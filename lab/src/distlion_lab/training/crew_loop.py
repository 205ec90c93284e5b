"""The run loop of a member of a crew: members may change, and the loop goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from distlion.crew import Crew, CrewLion
from distlion_lab.baselines.ring import ring_all_reduce_bytes
from distlion_lab.tasks.base import Task
from distlion_lab.training.device import find_device
from distlion_lab.training.gradient import compute_gradient
from distlion_lab.training.history import Series
from distlion_lab.training.loop import (
    FINAL_LOSS_STEPS,
    Progress,
    check_finite,
    conclude_scores,
    lr_factor,
    make_record,
    score_heldout,
    start_worker,
)
from distlion_lab.training.record import Record
from distlion_lab.training.train_settings import TrainSettings
from distlion_lab.training.workers import digest_parameters


class CarriedSeries(Series):
    """Series that a newcomer takes from the most advanced member; losses are one member's.

    Attributes:
        full_precision_bytes: Bytes that a ring all-reduce of gradients would have sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_precision_bytes = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {
            "losses": self.losses,
            "evaluations": self.evaluations,
            "full_precision_bytes": self.full_precision_bytes,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        self.losses, self.evaluations = state["losses"], state["evaluations"]
        self.full_precision_bytes = state["full_precision_bytes"]
        self._start_s = time.perf_counter() - state["seconds"]


@dataclass(frozen=True)
class Ending:
    """A member's results at the end of the run.

    Attributes:
        record: Record of the run, as this member knows it.
        digest: Digest of its parameters.
    """

    record: Record
    digest: str


class CrewLoop:
    """Train a task as a member of a crew.

    Args:
        settings: The run's settings; the crew may have more or fewer members than ``workers``.
        task: The data and model.
        crew: The crew.
        observe: Called by the member that is first at the time, after every step.
    """

    def __init__(
        self,
        settings: TrainSettings,
        task: Task,
        crew: Crew,
        observe: Callable[[Progress], None],
    ) -> None:
        self._settings, self._task, self._crew, self._observe = settings, task, crew, observe
        self._device = find_device(settings.device, 0)
        model = task.build_model(seed=settings.seed).to(self._device)
        self._trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._series = CarriedSeries()
        crew.carry(series=self._series)
        make = partial(crew.optimizer, buffers=list(model.buffers()))
        self._worker = start_worker(settings, model, make)
        assert isinstance(self._worker.optimizer, CrewLion)  # the crew made it
        self._optimizer = self._worker.optimizer
        self._schedule = LambdaLR(self._optimizer, partial(lr_factor, settings=settings))
        crew.carry(schedule=self._schedule)
        self._training_s, self._units, self._epoch = 0.0, 0, 0

    @property
    def _done(self) -> int:
        return self._optimizer.committed_step

    def run(self) -> Ending:
        """Train to the last step, with the members that are there.

        Raises:
            NonFiniteError: The loss is no longer finite.
            CrewError: Too few members are left.
        """
        self._evaluate_if_due()
        while self._done < self._settings.steps:
            self._step()
            self._evaluate_if_due()
        self._crew.finish()
        return self._conclude()

    def _step(self) -> None:
        crew = self._crew
        if crew.admit():
            return
        start_s, step = time.perf_counter(), self._done
        place, size = crew.rank, crew.size
        batch = self._task.training_batch(
            seed=self._settings.seed, step=step, rank=place, world_size=size
        )
        seed, device = self._settings.seed, self._device
        found = compute_gradient(
            self._worker.model, batch, seed=seed, step=step, rank=place, device=device
        )
        lr, loss = float(self._schedule.get_last_lr()[0]), float(found)
        # False if members have changed; the step may then be another one.
        was_committed = self._optimizer.step()
        self._optimizer.zero_grad()
        if not was_committed:
            return
        self._schedule.step()
        self._check_finite(loss, "training")
        self._series.add_step(step, loss=loss, lr=lr)
        self._series.full_precision_bytes += ring_all_reduce_bytes(self._trainable, size)
        self._units += self._task.units_per_batch * size
        self._training_s += time.perf_counter() - start_s

    def _evaluate_if_due(self) -> None:
        """Report, and now and then score all validation batches: any member may be the last one."""
        done, settings, evaluations = self._done, self._settings, self._series.evaluations
        is_due = done % settings.eval_every == 0 or done == settings.steps
        loss = None
        if is_due and done not in evaluations["step"]:
            model, everything = self._worker.model, slice(None)
            sums = score_heldout(model, self._task, self._device, everything)
            loss, accuracy = conclude_scores(sums)
            self._check_finite(loss, "validation")
            self._series.add_evaluation(done, loss=loss, accuracy=accuracy)
        self._report(loss)

    def _check_finite(self, loss: float, kind: str) -> None:
        check_finite(loss, kind, self._settings, rank=self._crew.rank, step=self._done)

    def _report(self, validation_loss: float | None) -> None:
        epoch, series, done = self._crew.epoch, self._series, self._done
        is_new, self._epoch = epoch.number != self._epoch, epoch.number
        if self._crew.rank:
            return
        names = ", ".join(f"{each.id} (process {each.pid})" for each in epoch.members)
        self._observe(
            Progress(
                step=done,
                steps=self._settings.steps,
                seconds=series.seconds,
                train_loss=series.losses["loss"][-1] if series.losses["loss"] else None,
                validation_loss=validation_loss,
                unit=self._task.unit,
                units=self._units,
                training_s=self._training_s,
                sent_bytes=self._worker.sent_bytes,
                bits_per_parameter=self._worker.bits_per_parameter,
                note=f"epoch {epoch.number}, step {done}: workers {names}" if is_new else "",
                members=f"epoch {epoch.number}, {len(epoch.members)} workers",
            )
        )

    def _conclude(self) -> Ending:
        series, worker = self._series, self._worker
        losses = series.losses["loss"][-FINAL_LOSS_STEPS:]
        record = make_record(
            self._settings,
            self._task,
            series,
            trainable_parameters=self._trainable,
            world_size=self._crew.size,
            final_train_loss=math.fsum(losses) / len(losses),
            wall_s=series.seconds,
            sent_bytes_per_worker=worker.sent_bytes,
            full_precision_bytes_per_worker=series.full_precision_bytes,
            bits_per_parameter=worker.bits_per_parameter,
            replicas_equal=False,  # until the parent, which has all digests, finds them equal
            traffic=worker.traffic(),
            diagnostics=worker.diagnostics(),
        )
        return Ending(record, digest_parameters(worker.model))

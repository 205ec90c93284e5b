"""Checkpoints of a run: when to save, and resuming from the latest one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from distlion.checkpoint import WorldChange, load_checkpoint, save_checkpoint
from distlion.errors import CheckpointError, InvalidArgumentError
from distlion.local import LocalSteps
from distlion.optim import VotingBase
from distlion_lab.tasks.base import Task
from distlion_lab.training.history import History
from distlion_lab.training.train_settings import OnDisagreement, TrainSettings
from distlion_lab.training.workers import RealWorker, gather_rows

CHECKPOINTS_NAME = "checkpoints"
"""Name of the folder, inside the run's folder."""

_LATEST = "latest"
_DIGEST = "data_sha256"
# Settings that a resumed run may change: losses do not depend on them, or --on-world-change says
# how.
_FREE = {"workers", "exchange", "overlap", "diagnose_every", "eval_every", "step_timeout_s"}


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Settings of checkpoints: saving and resuming.

    Args:
        every: Steps between checkpoints, at least 1; the last step is followed by one too. None
            for no checkpoints.
        keep: Complete checkpoints to keep, at least 1.
        resume: True to continue from the latest checkpoint; without one the run starts over.
        on_world_change: Momenta with which workers begin if their number has changed: see
            ``load_checkpoint``.

    Raises:
        InvalidArgumentError: A number is out of its range.
    """

    every: int | None = None
    keep: int = 3
    resume: bool = False
    on_world_change: WorldChange = "raise"

    def __post_init__(self) -> None:
        for name, value in (("checkpoint_every", self.every), ("keep", self.keep)):
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value}; expected a number of at least 1")

    @property
    def are_used(self) -> bool:
        """Return True if anything is saved or loaded."""
        return self.every is not None or self.resume

    def check(self, settings: TrainSettings) -> None:
        """Check that this training can be saved.

        Raises:
            InvalidArgumentError: It cannot.
        """
        if self.are_used and not settings.method.votes:
            raise InvalidArgumentError(
                f"checkpoints are requested with the rule {settings.rule}, a baseline whose state "
                "they cannot hold; --checkpoint-every and --resume belong to rules that vote"
            )

    def check_folder(self, run_dir: Path) -> None:
        """Check that the folder holds no checkpoints of another run.

        Raises:
            InvalidArgumentError: It holds some, and this run does not resume.
        """
        if self.every is not None and not self.resume and has_checkpoint(run_dir):
            raise InvalidArgumentError(
                f"{run_dir} holds checkpoints of an earlier run, and this one starts over. "
                "Expected a folder of its own for each run. Give --resume to go on from there, "
                f"another --run-dir, or remove {run_dir / CHECKPOINTS_NAME}"
            )


def has_checkpoint(run_dir: Path) -> bool:
    """Return True if a run's folder names a latest checkpoint, complete or not."""
    return os.path.exists(run_dir / CHECKPOINTS_NAME / _LATEST)


class RunCheckpoints:
    """The checkpoints of a run, as one worker sees them.

    Args:
        settings: Settings of checkpoints.
        run_dir: Folder of the run.
        training: Settings of the training.
        worker: Owner of model and optimizer.
        schedule: Schedule of the learning rate.
        history: Series and accounts for the record.
        task: The data, of which a checkpoint keeps a digest.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        run_dir: Path,
        *,
        training: TrainSettings,
        worker: RealWorker,
        schedule: LRScheduler,
        history: History,
        task: Task,
    ) -> None:
        # CheckpointSettings.check has looked.
        assert isinstance(worker.optimizer, VotingBase | LocalSteps)
        self._settings = settings
        self._run_dir = run_dir
        self._folder = run_dir / CHECKPOINTS_NAME
        self._training = training
        self._model = worker.model
        self._optimizer: VotingBase | LocalSteps = worker.optimizer
        self._schedule = schedule
        self._history = history
        self._task = task

    def resume(self) -> tuple[int, str]:
        """Continue from the latest checkpoint, if asked to; every worker must call it.

        Returns:
            Steps done, and a note for the user.

        Raises:
            CheckpointError: It is damaged, or belongs to another run; raised on every rank.
        """
        if not self._settings.resume:
            return 0, ""
        # Where hosts share no folder, one may have lost its checkpoints: loading reports it.
        if not gather_rows(
            torch.tensor(has_checkpoint(self._run_dir), dtype=torch.bool, device="cpu")
        ).any():
            return 0, f"no checkpoint in {self._folder}: starting from the beginning"
        loaded = load_checkpoint(
            self._folder,
            self._model,
            self._optimizer,
            self._schedule,
            on_world_change=self._settings.on_world_change,
        )
        extra = loaded.extra if isinstance(loaded.extra, dict) else {}
        self._check_settings(extra.get("settings", {}), loaded.path)
        self._check_data(extra.get(_DIGEST), loaded.path)
        self._history.restore(extra)
        done = loaded.local_step
        return done, f"resumed from {loaded.path}: step {done} of {self._training.steps}"

    def _check_settings(self, saved: dict[str, Any], path: Path) -> None:
        difference = describe_difference(saved, self._training)
        if difference is not None:
            raise CheckpointError(
                f"{path} was saved by a run with {difference}; "
                "resume with the settings of the run, or start another in another --run-dir"
            )

    def _check_data(self, saved: str | None, path: Path) -> None:
        now = self._task.describe().get(_DIGEST)
        is_other = saved not in (None, now)  # older checkpoints have none
        # Each host has data of its own, and all have to raise.
        others = (
            gather_rows(torch.tensor([is_other], dtype=torch.bool, device="cpu"))
            .flatten()
            .nonzero()
        )
        if len(others):
            found = f"{now} on this worker" if is_other else f"another one on worker {others[0, 0]}"
            raise CheckpointError(
                f"{path} was saved by a run on other data: {_DIGEST} {saved}, and this one has "
                f"{found}; resume with the data of the run, or start another in another --run-dir"
            )

    def save_if_due(self, done: int) -> str:
        """Save after ``done`` steps, if a checkpoint is due; every worker must call it.

        Returns:
            A note for the user: the reason why nothing could be saved, on all ranks. The last
            checkpoint is unchanged, and training may continue.

        Raises:
            ReplicaMismatchError: Parameters differ between workers.
            StepError: A worker is lost.
        """
        every = self._settings.every
        if every is None or (done % every and done != self._training.steps):
            return ""
        extra = {
            "settings": self._training.to_json(),
            _DIGEST: self._task.describe().get(_DIGEST),
            **self._history.to_extra(),
        }
        try:
            save_checkpoint(
                self._folder,
                self._model,
                self._optimizer,
                self._schedule,
                extra,
                keep_last=self._settings.keep,
            )
        except CheckpointError as error:
            return f"no checkpoint after step {done}, training goes on: {error}"
        return ""


def describe_difference(saved: dict[str, Any], training: TrainSettings) -> str | None:
    """Describe the first setting in which a resumed run would differ; None if there is none.

    Args:
        saved: Settings of the run that saved, as JSON types.
        training: Settings of the run that resumes.
    """
    free = _FREE
    if training.on_disagreement is OnDisagreement.EXCLUDE:
        free = free - {"diagnose_every"}  # it decides whose votes count
    saved = {"on_disagreement": OnDisagreement.WARN.value} | saved  # newer than some checkpoints
    for name, now in training.to_json().items():
        if name not in free and saved.get(name) != now:
            return f"{name} {saved.get(name)}, and this one has {now}"
    return None

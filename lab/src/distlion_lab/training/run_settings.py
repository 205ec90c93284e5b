"""The settings of one run of a comparison, and the digest that names its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from distlion_lab.errors import DataError
from distlion_lab.json_file import read_json
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import PartitionName, Schedule, TaskName, TrainSettings

_DIGEST_DIGITS = 16
_DATA_FIELDS = ("task", "data", "partition", "alpha", "tokenizer", "model_config", "batch_size")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings on which the losses of a run with virtual workers depend.

    Args:
        task: The task to train.
        data: Training data; None for the task's embedded data.
        partition: Partition of the training data among workers.
        alpha: Concentration of the partition ``by-class``; None for other partitions.
        tokenizer: Level of text; None for other tasks.
        model_config: A transformers config; None for the task's preset.
        method: Name of a method.
        workers: Virtual workers, at least 1.
        seed: Seed of weights, data order, dropout and random tie-breaking; 0 or above.
        lr: Highest learning rate, above 0.
        weight_decay: Weight decay, at least 0.
        steps: Optimizer steps, at least 1.
        schedule: Course of the learning rate.
        warmup_steps: Steps of linear rise, at least 0.
        batch_size: Examples of one worker in a step, at least 1.
        eval_every: Steps between evaluations, at least 1; the first one comes before the first
            step, and the last one after the last step.
        device: Device to train on, such as ``cpu`` or ``cuda``.

    Raises:
        InvalidArgumentError: A number is out of its range, or two settings are incompatible.
    """

    task: TaskName
    data: str | None
    partition: PartitionName
    alpha: float | None
    tokenizer: Tokenizer | None
    model_config: Path | None
    method: str
    workers: int
    seed: int
    lr: float
    weight_decay: float
    steps: int
    schedule: Schedule
    warmup_steps: int
    batch_size: int
    eval_every: int
    device: str

    def __post_init__(self) -> None:
        self.to_training()

    def __str__(self) -> str:
        return f"{self.method}, {self.workers} workers, lr {self.lr:g}, seed {self.seed}"

    @property
    def work(self) -> int:
        """Number of forward and backward passes of the run, to which its time is proportional."""
        return self.steps * self.workers

    def to_training(self) -> TrainSettings:
        """Return these as settings of the run loop; their rule has no meaning here."""
        shared = {field.name for field in dataclasses.fields(TrainSettings)}
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in shared
        }
        return TrainSettings.with_defaults(**given)

    def to_data(self) -> TrainSettings:
        """Return the settings of the task, equal for runs that can share it."""
        given = {name: getattr(self, name) for name in _DATA_FIELDS}
        return TrainSettings.with_defaults(workers=1, **given)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON types.

        A model config is included by its content, not its path, and a method by its name and its
        ``definition``. No record thus outlives a change of their meaning.

        Raises:
            DataError: The config cannot be read.
            InvalidArgumentError: The method is unknown.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["model_config"] = self._read_model_config()
        fields["definition"] = find_method(self.method).definition
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in fields.items()
        }

    def _read_model_config(self) -> Any:
        if self.model_config is None:
            return None
        try:
            return read_json(self.model_config)
        except DataError as error:
            raise DataError(
                f"model config {str(self.model_config)!r} cannot be read: {error}"
            ) from error

    def name_record(self) -> str:
        """Name the run by its main settings and a digest of all settings."""
        text = json.dumps(self.to_json(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
        return f"{self.method}-{self.workers}-{self.seed}-{digest}"

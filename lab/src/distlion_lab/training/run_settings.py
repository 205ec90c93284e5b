"""The settings of one run of a comparison, and the digest that names its record."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from distlion_lab.errors import DataError
from distlion_lab.json_file import read_json
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import TrainSettings, WorkSettings

_DIGEST_DIGITS = 16
_DATA_FIELDS = ("task", "data", "partition", "alpha", "tokenizer", "model_config", "batch_size")


@dataclass(frozen=True, kw_only=True)
class RunSettings(WorkSettings):
    """All settings on which the losses of a run with virtual workers depend.

    Args:
        method: Name of a method.
        workers: Virtual workers, at least 1.
        seed: Seed of weights, data order, dropout and random tie-breaking; 0 or above.
        lr: Highest learning rate, above 0.
        weight_decay: Weight decay, at least 0.

    Raises:
        InvalidArgumentError: A number is out of its range, or two settings are incompatible.
    """

    method: str
    workers: int
    seed: int
    lr: float
    weight_decay: float

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
        own = {name: getattr(self, name) for name in ("workers", "seed", "lr", "weight_decay")}
        return TrainSettings.with_defaults(**self.shared(), **own)

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
        return super().to_json() | {
            "model_config": self._read_model_config(),
            "definition": find_method(self.method).definition,
        }

    def _read_model_config(self) -> Any:
        if self.model_config is None:
            return None
        try:
            content = read_json(self.model_config)
        except DataError as error:
            raise DataError(
                f"model config {str(self.model_config)!r} cannot be read: {error}"
            ) from error
        # JSON itself has no infinite numbers, but some configs do: mamba2's time_step_limit.
        return json.loads(json.dumps(content), parse_constant=str)

    def name_record(self) -> str:
        """Name the run by its main settings and a digest of all settings."""
        text = json.dumps(self.to_json(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
        return f"{self.method}-{self.workers}-{self.seed}-{digest}"
